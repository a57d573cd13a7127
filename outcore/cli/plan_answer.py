"""What `outcore plan` answers with: a table on the console, JSON for machines, a page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from outcore.cli.report import write_json, write_text
from outcore.planning.plan import Plan

if TYPE_CHECKING:
    from outcore.machine.machine import Machine
    from outcore.planning.compare import Comparison
    from outcore.planning.smaller_budget import SmallerBudget


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan, and what is said beside it."""

    plan: Plan
    machine: Machine
    smaller: SmallerBudget | None
    comparison: Comparison | None
    longest_sequence: int | None  # that the model was made for


def show(answer: Answer, console: Console) -> None:
    """Print the plan, the comparison if there is one, and what to keep in mind."""
    from outcore.cli.compare_table import comparison_report
    from outcore.views.explain import explain

    console.print(explain(answer.plan, machine=answer.machine, smaller=answer.smaller))
    for note in _notes(answer):
        console.print(note, style="yellow", markup=False)
    if answer.comparison is not None:
        console.print("")
        console.print(comparison_report(answer.comparison))


def _notes(answer: Answer) -> list[str]:
    """Return what the figures do not say, a sentence each: for the console and the page."""
    from outcore.model_config import too_long
    from outcore.planning.device_type import device_type, slower_than_predicted

    job, notes = answer.plan.job, []
    if job.dtype == "fp32":
        notes.append(
            "Planned in fp32, in which the engine computes on a CPU; with --state compact or "
            "minimal it computes in bf16."
        )
    for warning in (
        slower_than_predicted(job.dtype, device_type(answer.machine)),
        too_long(job.seq_len, answer.longest_sequence),
    ):
        if warning:
            notes.append(f"{warning[0].upper()}{warning[1:]}.")
    return notes


def write_files(answer: Answer, json_file: str | None, html_file: str | None) -> None:
    """Write the files that were asked for."""
    from outcore.views.page import plan_page

    if json_file is not None:
        write_json(_values(answer), json_file)
    if html_file is not None:
        page = plan_page(
            answer.plan,
            machine=answer.machine,
            smaller=answer.smaller,
            comparison=answer.comparison,
            notes=_notes(answer),
        )
        write_text(page, html_file)


def _values(answer: Answer) -> dict[str, Any]:
    from outcore.planning.plan_json import plan_to_dict

    comparison = answer.comparison
    return {
        **plan_to_dict(answer.plan),
        "machine": asdict(answer.machine),
        "smaller_budget": _smaller_values(answer.smaller),
        "comparison": None if comparison is None else asdict(comparison),
    }


def _smaller_values(smaller: SmallerBudget | None) -> dict[str, Any] | None:
    if smaller is None:
        return None
    prediction = None if smaller.plan is None else smaller.plan.prediction
    return {
        "device_bytes": smaller.device_bytes,
        "step_s": None if prediction is None else prediction.step_s,
        "tokens_per_s": None if prediction is None else prediction.tokens_per_s,
        "refusal": smaller.refusal or None,
    }
