"""A plan as plain values for JSON, and back: exact, versioned, and hostile until checked.

``plan_to_dict`` gives ``{"format", "version", "plan"}``. A reader ignores other keys beside these,
so that a report can carry more than the plan; inside the plan every key is known and checked, and
a mistake is a ``ValueError`` that says where it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from outcore.planning.plan import (
    Activations,
    BlockPlan,
    Budgets,
    Clipping,
    FrozenWeights,
    Job,
    Plan,
    Prediction,
    Span,
    StateFormat,
    Tier,
)

FORMAT = "outcore plan"
VERSION = 2
MOST_TEXT = 4096  # characters of a name or path
MOST_INT = 2**63 - 1

T = TypeVar("T")
Check = Callable[[Any, str], Any]


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as dictionaries, lists, texts and numbers."""
    timeline = [[s.lane, s.name, s.start_s, s.end_s] for s in plan.prediction.timeline]
    bare = replace(plan.prediction, timeline=())  # asdict copies, and spans are many
    values = asdict(replace(plan, prediction=bare))
    for name in ("blocks", "block_parameters"):
        values[name] = list(values[name])
    values["prediction"]["timeline"] = timeline
    return {"format": FORMAT, "version": VERSION, "plan": values}


def plan_from_dict(data: Any) -> Plan:
    """Return the plan that ``plan_to_dict`` wrote; ValueError for anything else."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(f'this is no plan: it has no "format": "{FORMAT}"')
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(
            f"the plan has version {_short(version)}, this Outcore reads versions 1 to {VERSION}: "
            "make the plan again with outcore plan"
        )
    plan: Plan = _plan(data.get("plan") if version == VERSION else _upgraded(data), "plan")
    return plan


def _upgraded(data: Mapping[str, Any]) -> Any:
    """Return a plan of version 1, which clipped or did not, as this version has it."""
    plan = data.get("plan")
    if not isinstance(plan, Mapping) or not isinstance(plan.get("job"), Mapping):
        return plan
    job = dict(plan["job"])
    if "clips" in job:
        job["clipping"] = "waiting" if _bool(job.pop("clips"), "plan.job.clips") else "none"
    return {**plan, "job": job}


def read_plan(path: str | Path) -> Plan:
    """Return the plan in a file; ValueError if it holds none, OSError if it cannot be read."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        raise ValueError(f"{path} is no JSON file: {error}") from None
    try:
        return plan_from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a text, not {_short(value)}")
    if len(value) > MOST_TEXT:
        raise ValueError(f"{where} has {len(value)} characters, {MOST_TEXT} are allowed")
    return value


def _bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} must be true or false, not {_short(value)}")
    return value


def _whole(least: int) -> Check:
    def check(value: Any, where: str) -> int:
        if type(value) is not int:
            raise ValueError(f"{where} must be a whole number, not {_short(value)}")
        if not least <= value <= MOST_INT:
            raise ValueError(f"{where} must be {least} to 2^63 - 1, not {_short(value)}")
        return value

    return check


def _real(value: Any, where: str) -> float:
    """A number that is finite and not negative."""
    if type(value) not in (int, float):
        raise ValueError(f"{where} must be a number, not {_short(value)}")
    if isinstance(value, int) and value > MOST_INT:
        raise ValueError(f"{where} is too large: {_short(value)}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where} must be finite and not negative, not {_short(value)}")
    return float(value)


def _one_of(literal: Any) -> Check:
    choices = get_args(literal)

    def check(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{where} must be one of {', '.join(choices)}, not {_short(value)}")
        return value

    return check


def _optional(check: Check) -> Check:
    return lambda value, where: None if value is None else check(value, where)


def _mapping(key: Check, item: Check) -> Check:
    def check(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, not {_short(value)}")
        return {
            key(name, f"a key of {where}"): item(value[name], f"{where}.{_short(name)}")
            for name in value
        }

    return check


def _tuple(item: Check) -> Check:
    def check(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} must be a list, not {_short(value)}")
        return tuple(item(each, f"{where}[{i}]") for i, each in enumerate(value))

    return check


def _span(value: Any, where: str) -> Span:
    if not isinstance(value, (list, tuple)) or len(value) != 4:
        raise ValueError(f"{where} must be [lane, name, start, end], not {_short(value)}")
    lane, name = _text(value[0], f"{where}[0]"), _text(value[1], f"{where}[1]")
    start_s, end_s = _real(value[2], f"{where}[2]"), _real(value[3], f"{where}[3]")
    if end_s < start_s:
        raise ValueError(f"{where} ends at {end_s} s, before it starts at {start_s} s")
    return Span(lane=lane, name=name, start_s=start_s, end_s=end_s)


_tier = _one_of(Tier)
_bytes = _whole(0)
_CHECKS: dict[type, dict[str, Check]] = {}


def _object(kind: type[T], checks: dict[str, Check]) -> Check:
    """Check an object's keys against a dataclass's fields; those with a default may be absent."""
    _CHECKS[kind] = checks
    needed = [
        field.name
        for field in fields(kind)  # type: ignore[arg-type]
        if field.default is MISSING and field.default_factory is MISSING
    ]

    def check(value: Any, where: str) -> T:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, not {_short(value)}")
        for name in value:
            if name not in checks:
                raise ValueError(f"{where} has an unknown key {_short(name)}")
        for name in needed:
            if name not in value:
                raise ValueError(f"{where}.{name} is missing")
        return kind(**{name: checks[name](value[name], f"{where}.{name}") for name in value})

    return check


_budgets = _object(
    Budgets,
    {
        "device_bytes": _optional(_bytes),
        "host_bytes": _optional(_bytes),
        "disk_bytes": _optional(_bytes),
        "disk_path": _optional(_text),
    },
)
_job = _object(
    Job,
    {
        "tokens": _whole(1),
        "seq_len": _whole(1),
        "clipping": _one_of(Clipping),
        "dtype": _one_of(Literal["bf16", "fp32"]),
        "state_format": _one_of(StateFormat),
        "frozen_weights": _optional(_one_of(FrozenWeights)),
        "micro_batch": _optional(_whole(1)),
        "budgets": _budgets,
        "objective": _one_of(Literal["speed", "memory"]),
        "is_masked": _bool,
        "checkpoints": _bool,
    },
)
_block = _object(BlockPlan, {"weights": _tier, "state": _tier, "activations": _one_of(Activations)})
_prediction = _object(
    Prediction,
    {
        "step_s": _real,
        "tokens_per_s": _real,
        "tflops": _real,
        "busy_s": _mapping(_text, _real),
        "binding_lane": _text,
        "hiding_tokens": _optional(_whole(0)),
        "timeline": _tuple(_span),
    },
)
_plan = _object(
    Plan,
    {
        "model": _text,
        "machine": _text,
        "job": _job,
        "blocks": _tuple(_block),
        "edge_state": _tier,
        "micro_batch": _whole(1),
        "num_slots": _whole(0),
        "num_visits": _whole(0),
        "peak_bytes": _mapping(_tier, _mapping(_text, _bytes)),
        "block_parameters": _tuple(_whole(0)),
        "hidden_size": _optional(_whole(1)),
        "largest_kept_bytes": _optional(_whole(0)),
        "prediction": _prediction,
    },
)
