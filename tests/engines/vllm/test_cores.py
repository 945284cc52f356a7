"""Real engine cores without a loop, in the test's own process: how they are bound, guarded, counted and left alone."""

# ruff: noqa: ANN401 - vLLM's objects have no types here

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import vllm_cores as cores
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_serving import HIT_TOKENS, control, prompt, replicas, set_limit, wait_until

from kvcached.control import get_instances
from kvcached.engines.vllm import engine_core_hooks, register, taking_control
from kvcached.engines.vllm.free_queue import FreeQueue
from kvcached.engines.vllm.governor import Governor
from kvcached.engines.vllm.relied_on import StartRefusedError
from kvcached.replica_policy import ReplicaPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    MakeCore = Callable[..., Any]

NAME = "core"


@pytest.fixture(scope="module", autouse=True)
def _process() -> Iterator[None]:
    """Put this process under control once, and leave its environment as it was."""
    before = dict(os.environ)
    register()
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def ledger_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a ledger directory and a name of its own."""
    monkeypatch.setenv("KVCACHED_LEDGER_DIR", str(tmp_path / "ledger"))
    monkeypatch.setenv("KVCACHED_INSTANCE_NAME", NAME)
    monkeypatch.setenv("KVCACHED_MAX_CACHED_TOKENS", "-1")
    return tmp_path / "ledger"


@pytest.fixture
def make_core(model: Path) -> Iterator[MakeCore]:
    """Build engine cores, and shut them down at the end."""
    made = []

    def make(spoil: Callable[[Any], None] | None = None, **options: Any) -> Any:
        core = cores.make_core(cores.make_config(model, **options))
        made.append(core)
        if spoil is not None:
            spoil(core)
        core.get_supported_tasks()  # as LLM does, once the engine is built
        return core

    yield make
    for core in made:
        core.shutdown()


def state_of(name: str, ledger_dir: Path) -> dict[str, Any]:
    """Return the only replica of an instance."""
    (replica,) = replicas(name, ledger_dir)
    return replica


# Names and slots --------------------------------------------------------------------------------------------------


def test_unnamed_engines_of_one_program_have_names_of_their_own(
    make_core: MakeCore, ledger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three engines without a name are three instances, each controlled; a free name is used again."""
    monkeypatch.delenv("KVCACHED_INSTANCE_NAME")
    first, *_ = (make_core() for _ in range(3))
    name = f"vllm-{os.getpid()}"
    assert {each.name for each in get_instances(ledger_dir)} == {name, f"{name}-2", f"{name}-3"}
    set_limit(0, f"{name}-3", ledger_dir)
    first.shutdown()
    make_core()
    assert {each.name for each in get_instances(ledger_dir)} == {name, f"{name}-2", f"{name}-3"}


def test_the_slot_of_an_uncontrolled_engine_goes_with_it(
    make_core: MakeCore, ledger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without prefix caching says so as long as it lives, and blocks no later engine."""
    monkeypatch.delenv("KVCACHED_INSTANCE_NAME")
    core = make_core(enable_prefix_caching=False)
    name = f"vllm-{os.getpid()}"
    assert state_of(name, ledger_dir)["outcome"] == "unsupported_engine"
    core.shutdown()
    assert replicas(name, ledger_dir) == []
    make_core()
    assert state_of(name, ledger_dir)["outcome"] == "startup"


# Failures at the start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["group_block_tokens", "member_ids", "_attach_to_loop", "_identity", "Governor"])
def test_any_failure_at_the_start_leaves_the_engine_alone_and_says_why(
    part: str, make_core: MakeCore, ledger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the plugin stumbles: the slot gives the reason, waiting ends at once, and no method stays replaced."""

    def stumble(*_args: object, **_named: object) -> None:
        message = "this vLLM renamed it"
        raise AttributeError(message)

    monkeypatch.setattr(taking_control, part, stumble)
    core = make_core()
    state = state_of(NAME, ledger_dir)
    assert (state["outcome"], state["reason"]) == ("unsupported_engine", "AttributeError: this vLLM renamed it")
    assert control("set", "0", "--instance", NAME, "--wait", "20", ledger_dir=ledger_dir).returncode == 7
    assert not ours(core)
    assert [cores.serve(core, 1), cores.serve(core, 1)] == [0, HIT_TOKENS]


def test_strict_refuses_at_any_failure(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``KVCACHED_STRICT=1`` an engine that the plugin stumbles over does not start."""
    monkeypatch.setenv("KVCACHED_STRICT", "1")
    monkeypatch.delattr(taking_control, "member_ids")
    with pytest.raises(StartRefusedError, match="NameError: name 'member_ids' is not defined"):
        make_core()


def test_strict_refuses_an_externally_launched_rank_while_it_is_built(make_core: MakeCore) -> None:
    """What the configuration tells is looked at before a server could say that it is ready."""
    core = make_core()
    engine_core_hooks._refuse_early(core)
    core.vllm_config.parallel_config.distributed_executor_backend = "external_launcher"
    engine_core_hooks._refuse_early(core)  # alone it decides for itself
    core.vllm_config.parallel_config.world_size = 2
    with pytest.raises(StartRefusedError, match="external launcher"):
        engine_core_hooks._refuse_early(core)


def test_another_pool_or_queue_than_vllms_own_is_refused(make_core: MakeCore, ledger_dir: Path) -> None:
    """A pool or free queue of another class, which may order its blocks in another way, is not governed."""

    def another(part: Any) -> None:
        part.__class__ = type(f"Other{type(part).__name__}", (type(part),), {})

    core = make_core(spoil=lambda core: another(cores.pool_of(core)))
    assert "has a OtherBlockPool instead of vLLM's own BlockPool" in state_of(NAME, ledger_dir)["reason"]
    core.shutdown()
    make_core(spoil=lambda core: another(cores.pool_of(core).free_block_queue))
    assert "OtherFreeKVCacheBlockQueue" in state_of(NAME, ledger_dir)["reason"]


# Failures later ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["_popped", "_note_holes", "recount"])
def test_a_fault_of_the_bookkeeping_ends_the_control_and_not_vllms_call(
    part: str, make_core: MakeCore, ledger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine serves on with its own methods, and its slot says what went wrong."""
    core = make_core()
    before = cores.serve(core, 1)
    governor = core.__dict__[engine_core_hooks._GOVERNOR]._governor
    governor._bounded.idle._free.holes.add(-1)  # or batches would not look at holes

    def stumble(*_args: object) -> None:
        raise ZeroDivisionError(part)

    monkeypatch.setattr(FreeQueue, part, stumble)
    if part == "recount":
        assert core.reset_prefix_cache()
    if part == "_note_holes":
        cores.pool_of(core).evict_blocks({1})
    assert (before, cores.serve(core, 2), cores.serve(core, 2)) == (0, 0, HIT_TOKENS)
    state = state_of(NAME, ledger_dir)
    assert (state["outcome"], state["reason"]) == (
        "unsupported_engine",
        f"the plugin failed: ZeroDivisionError: {part}",
    )
    assert not ours(core)
    core.shutdown()
    assert replicas(NAME, ledger_dir) == []


@pytest.mark.parametrize("part", ["lift", "resume"])
def test_a_fault_around_a_reset_ends_the_control_and_not_the_reset(
    part: str, make_core: MakeCore, ledger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix cache is reset, whatever becomes of the cap before and after it."""
    core = make_core()
    cores.serve(core, 1)

    def stumble(_policy: ReplicaPolicy) -> None:
        raise ZeroDivisionError(part)

    monkeypatch.setattr(ReplicaPolicy, part, stumble)
    assert core.reset_prefix_cache()
    assert not ours(core)
    assert [cores.serve(core, 1), cores.serve(core, 1)] == [0, HIT_TOKENS]
    assert state_of(NAME, ledger_dir)["reason"] == f"the plugin failed: ZeroDivisionError: {part}"


def test_a_reset_that_fails_raises_vllms_own_exception_and_the_control_goes_on(
    make_core: MakeCore, ledger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cap is enforced again also after a reset that raised, and nothing of ours is in the exception's place."""

    def fail(_pool: BlockPool) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(BlockPool, "reset_prefix_cache", fail)
    core = make_core()
    cores.serve(core, 1)
    with pytest.raises(ZeroDivisionError):
        cores.pool_of(core).reset_prefix_cache()
    assert cores.serve(core, 1) == HIT_TOKENS
    assert state_of(NAME, ledger_dir)["outcome"] == "startup"


def test_a_fault_on_the_watchers_thread_ends_the_control(
    make_core: MakeCore, ledger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine has no other thread to notice: waiters are told, and the engine keeps serving."""
    core = make_core()

    def stumble(_governor: Governor) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Governor, "on_idle", stumble)
    assert control("set", "0", "--instance", NAME, "--wait", "20", ledger_dir=ledger_dir).returncode == 7
    assert not ours(core)
    assert [cores.serve(core, 1), cores.serve(core, 1)] == [0, HIT_TOKENS]


def test_a_count_that_went_wrong_ends_the_control(
    make_core: MakeCore, ledger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then an idle engine's count is compared with its queue; from a wrong one no limit is kept."""
    core = make_core()
    cores.serve(core, 1)
    governor = core.__dict__[engine_core_hooks._GOVERNOR]._governor
    monkeypatch.setattr(governor, "_next_check", 0.0)
    set_limit(320, NAME, ledger_dir)
    wait_until(lambda: governor._next_check > 0.0, 10.0)  # it checks after it acknowledged
    governor._bounded.idle._free.front -= 3
    governor._next_check = 0.0
    control("set", "320", "--instance", NAME, ledger_dir=ledger_dir)
    state = wait_until(lambda: (found := state_of(NAME, ledger_dir))["reason"] and found, 10.0)
    assert state["outcome"] == "unsupported_engine"
    assert "10 of 127 free blocks were counted as idle, and a walk finds 7 of 127" in state["reason"]
    wait_until(lambda: not ours(core), 10.0)  # the watcher's thread says it first, and then gives the methods back


# What passes through ----------------------------------------------------------------------------------------------


def test_arguments_pass_through_by_position_and_by_name(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replaced method takes what the stock one takes, also an argument that only a later release has."""
    seen = []

    def later(owner: type[Any], name: str) -> None:
        stock = getattr(owner, name)

        def method(self: Any, *args: Any, later_argument: str = "", **named: Any) -> Any:
            seen.append(later_argument)
            return stock(self, *args, **named)

        monkeypatch.setattr(owner, name, method)

    for owner, names in (
        (BlockPool, ("evict_blocks", "reset_prefix_cache")),
        (FreeKVCacheBlockQueue, ("popleft", "popleft_n", "prepend_n", "append")),
        (Scheduler, ("schedule", "_free_request_blocks")),
    ):
        for name in names:
            later(owner, name)
    core = make_core()
    cores.serve(core, 1)
    pool, queue, scheduler = cores.pool_of(core), cores.pool_of(core).free_block_queue, core.scheduler
    blocks = queue.popleft_n(3, later_argument="popleft_n")
    queue.prepend_n(blocks=blocks[1:], later_argument="prepend_n")
    assert queue.popleft(later_argument="popleft") is blocks[1]
    queue.append(block=blocks[1])
    queue.prepend_n(blocks[:1])
    pool.evict_blocks(block_ids=iter(range(1, cores.BLOCKS)), later_argument="evict_blocks")
    assert pool.reset_prefix_cache(later_argument="reset_prefix_cache")
    cores.add(core, "by-name", prompt(2))
    scheduler.schedule(later_argument="schedule")
    scheduler._free_request_blocks(request=scheduler.requests["by-name"], later_argument="_free_request_blocks")
    names = (
        "popleft_n",
        "prepend_n",
        "popleft",
        "evict_blocks",
        "reset_prefix_cache",
        "schedule",
        "_free_request_blocks",
    )
    assert [each for each in seen if each] == list(names)
    governor = core.__dict__[engine_core_hooks._GOVERNOR]._governor
    assert governor._bounded.idle.count == cores.idle_blocks(core)
    assert governor._advisor._observer._estimator is not None


# An engine in the application --------------------------------------------------------------------------------------


def test_a_request_that_ends_after_its_step_leaves_nothing_above_the_limit(
    make_core: MakeCore, ledger_dir: Path
) -> None:
    """An abort, as of a request that met its stop string, is followed by no step: the limit is enforced at once."""
    core = make_core()
    set_limit(0, NAME, ledger_dir)
    cores.add(core, "stopped", prompt(1), max_tokens=100)
    cores.step(core)
    assert state_of(NAME, ledger_dir)["idle_tokens"] == cores.idle_blocks(core) == 0
    core.abort_requests(["stopped"])
    assert cores.idle_blocks(core) == 0
    assert state_of(NAME, ledger_dir)["active_tokens"] == 0
    assert cores.serve(core, 1) == 0


def test_a_question_for_the_supported_tasks_costs_no_turn(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pooling model is asked for its tasks with every request: only the first time binds the engine."""
    turns = []
    monkeypatch.setattr(Governor, "on_idle", lambda _: turns.append(1))
    core = make_core()
    for _ in range(10):
        core.get_supported_tasks()
    assert len(turns) == 1


def ours(core: Any) -> list[str]:
    """Return the methods of the engine core's objects that are the plugin's."""
    return [
        name
        for attributes in cores.own_attributes(core)
        for name, value in attributes.items()
        if getattr(value, "__module__", "").startswith("kvcached") or "kvcached" in getattr(value, "__qualname__", "")
    ]
