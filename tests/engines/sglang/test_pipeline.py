"""With pipeline stages the limit is refused, in words, and nothing else changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_server import INSTANCE, prompt

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Say, Serve


def test_pipeline_stages_refuse_a_limit(serve: Serve, plain_model: Path, say: Say) -> None:
    """A publication is accepted, waiting for it ends at once with the reason, no stage evicts, serving goes on."""
    server = serve(plain_model, "--pp-size", "2", environ={"KVCACHED_MAX_CACHED_TOKENS": "64"})
    server.generate(prompt(1, 512))
    assert server.generate(prompt(1, 512)).cached_tokens == 511
    assert server.set_limit(0).code == 0
    waited = server.set_limit(0, "--wait", "30")
    say(f"set --wait: exit {waited.code} after {waited.seconds:.2f} s: {waited.err.strip()}")
    assert waited.code == 7
    assert waited.seconds < 10
    assert "pp_size" in waited.out + waited.err
    assert server.generate(prompt(1, 512)).cached_tokens == 511
    assert not any(server.metric("sglang:evicted_tokens_total").values())
    for revision in (1, 2):
        lines = [line for line in server.log().splitlines() if f"revision {revision} " in line and "rejected" in line]
        assert len(lines) == 2, lines
    capped = server.control("cap", "8000", "--instance", INSTANCE, "--wait", "30")
    assert capped.code == 7
    assert "pp_size" in capped.out + capped.err
    replica = server.status()[0]
    assert replica["cap"]["outcome"] == "rejected_pipeline_parallel"
    assert replica["cap"]["limit_tokens"] == -1
    assert "pp_size" in replica["returns"]
    assert replica["outcome"] == "rejected_pipeline_parallel"
    assert replica["applied"]["revision"] == 0
    assert replica["pp_size"] == 2
