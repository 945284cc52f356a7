"""A fleet's documents in etcd: the only package that imports grpc and protobuf (``kvcached-control[fleet]``)."""
