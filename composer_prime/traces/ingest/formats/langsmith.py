"""LangSmith's runs: a list, one a line, or an SDK's batch of `post` and `patch`. Records are the runs.

A run's messages are LangChain's, or what a wrapped client was given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_prime.traces.ingest.dialects.exchanges import Calls, Exchange, exchange_of
from composer_prime.traces.ingest.messages import tools_of
from composer_prime.traces.ingest.records import each, mapping, name_or_none, objects, sequence

NO_CALL = "run that is no call of a model"
NO_TEXT = "call of a model without its messages or its answer"


def _marks(value: Any) -> dict[str, bool]:
    runs = objects(_runs(value))
    return {
        "runs with inputs": any(isinstance(run.get("inputs"), dict) for run in runs),
        "runs with start_time": any("start_time" in run for run in runs),
    }


def _runs(value: Any) -> Sequence[Any]:
    """Runs; of a batch, each with what was patched later."""
    given = mapping(value)
    if not isinstance(given.get("post"), list):
        return each(value)
    posted, patched = objects(given["post"]), objects(sequence(given.get("patch")))
    late = {run.get("id") if isinstance(run.get("id"), str) else None: run for run in patched}
    only = late.get(None, {}) if len(posted) == 1 else {}  # a patch's id may stand in its address alone
    return [
        {**run, **{name: value for name, value in late.get(str(run.get("id")), only).items() if value}}
        for run in posted
    ]


def _exchange(given: Mapping[str, Any]) -> Exchange | str:
    asked, answered, extra = (mapping(given.get(name)) for name in ("inputs", "outputs", "extra"))
    is_batch = isinstance(next(iter(sequence(asked.get("messages"))), None), list)
    if given.get("run_type", "llm" if is_batch else "") != "llm":
        return NO_CALL
    found = exchange_of(asked, answered)
    if found is None or not found.messages:
        return NO_TEXT
    called, about = mapping(extra.get("invocation_params")), mapping(extra.get("metadata"))
    names = (mapping(answered.get("llm_output")).get("model_name"), found.author, about.get("ls_model_name"))
    usage = found.usage or mapping(answered.get("usage_metadata")) or None
    author, call = name_or_none(*names, called.get("model")), name_or_none(found.call, given.get("id"))
    return replace(found, tools=found.tools or tools_of(called.get("tools")), author=author, usage=usage, call=call)


FORMAT = Calls("langsmith", _marks, _runs, _exchange)
