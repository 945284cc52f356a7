"""etcd's messages, declared here by their field numbers in a descriptor pool of their own.

So there is no generated code that fits one release of protobuf only, and no clash with another package in the process
that registers etcd's messages in the shared pool. Only the fields that are used are declared; enums are plain numbers,
which are the same on the wire.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "kvcached_etcd"

_KINDS = {
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "text": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "int": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
}

_FIELDS = {
    "KeyValue": "key=1:bytes create_revision=2:int mod_revision=3:int version=4:int value=5:bytes lease=6:int",
    "Event": "type=1:int kv=2:KeyValue",
    "Header": "cluster_id=1:uint member_id=2:uint revision=3:int raft_term=4:uint",
    "RangeRequest": "key=1:bytes range_end=2:bytes limit=3:int revision=4:int keys_only=8:bool count_only=9:bool",
    "RangeResponse": "header=1:Header kvs=2:KeyValue* more=3:bool count=4:int",
    "PutRequest": "key=1:bytes value=2:bytes lease=3:int",
    "PutResponse": "header=1:Header",
    "DeleteRequest": "key=1:bytes range_end=2:bytes",
    "DeleteResponse": "header=1:Header deleted=2:int",
    "RequestOp": "request_range=1:RangeRequest request_put=2:PutRequest request_delete_range=3:DeleteRequest",
    "ResponseOp": "response_range=1:RangeResponse response_put=2:PutResponse response_delete_range=3:DeleteResponse",
    "Compare": "result=1:int target=2:int key=3:bytes mod_revision=6:int",
    "TxnRequest": "compare=1:Compare* success=2:RequestOp* failure=3:RequestOp*",
    "TxnResponse": "header=1:Header succeeded=2:bool responses=3:ResponseOp*",
    "WatchCreate": "key=1:bytes range_end=2:bytes start_revision=3:int",
    "Empty": "",
    "WatchRequest": "create_request=1:WatchCreate progress_request=3:Empty",
    "WatchResponse": "header=1:Header watch_id=2:int created=3:bool canceled=4:bool compact_revision=5:int "
    "cancel_reason=6:text events=11:Event*",
    "LeaseGrantRequest": "TTL=1:int ID=2:int",
    "LeaseGrantResponse": "header=1:Header ID=2:int TTL=3:int error=4:text",
    "LeaseRevokeRequest": "ID=1:int",
    "LeaseRevokeResponse": "header=1:Header",
    "LeaseKeepAliveRequest": "ID=1:int",
    "LeaseKeepAliveResponse": "header=1:Header ID=2:int TTL=3:int",
}
"""Each message's fields as NAME=NUMBER:KIND; a ``*`` is a repeated one."""

MOD_REVISION = 2
"""The target of a comparison: the key's last revision, 0 of a key that does not exist."""

DELETED = 1
"""The type of an event about a key that is gone."""


def _declare() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="kvcached_etcd.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            _add_field(message, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _FIELDS}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


def _add_field(message: descriptor_pb2.DescriptorProto, text: str) -> None:
    name, _, rest = text.partition("=")
    number, _, kind = rest.partition(":")
    proto = descriptor_pb2.FieldDescriptorProto
    label = proto.LABEL_REPEATED if kind.endswith("*") else proto.LABEL_OPTIONAL
    field = message.field.add(name=name, number=int(number), label=label)
    kind = kind.rstrip("*")
    if kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = proto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


MESSAGES = _declare()
"""The message classes by name."""


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with ``prefix``, which does not end in the byte 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
