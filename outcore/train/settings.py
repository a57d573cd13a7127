"""What a training run is told: one value, from the command line, a YAML file, or Python."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from outcore.data.chat_tokens import LossOn
from outcore.data.row_format import RowFormat
from outcore.store.disk_budget import parse_disk
from outcore.train.usual_names import USUAL_NAMES
from outcore.units import parse_budget

Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["bf16", "fp32"]
OnNonFinite = Literal["raise", "skip"]

FULL_LR = 1e-5
LORA_LR = 2e-4


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One run. None means: what fits the model, the machine or the job best."""

    # What is trained on what, and where it goes.
    model: str  # a Hugging Face directory, or the name of a shape (random weights)
    data: tuple[str, ...]
    output: str
    tokenizer: str | None = None  # a directory; None: the model's own

    # How long, in what portions.
    max_steps: int | None = None
    epochs: float | None = None  # 1 where max_steps is not given either
    tokens_per_step: int = 32_768
    seq_len: int | None = None  # 2,048, or what the model can

    # The optimizer.
    lr: float | None = None  # 1e-5; 2e-4 for LoRA
    schedule: Schedule = "cosine"
    warmup: float = 0.03  # below 1: a part of all steps, otherwise steps
    min_lr: float = 0.0  # at the end, as a part of lr
    weight_decay: float = 0.0  # of matrices; norms and biases have none
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0  # 0: no clipping, and updates start during the backward
    clip_in_two_passes: bool = False  # the first for the norm: saves the gradients' memory
    on_non_finite: OnNonFinite = "raise"
    seed: int = 0
    deterministic: bool = False  # deterministic algorithms, which the same bits on a GPU need

    # LoRA.
    lora: bool = False
    lora_rank: int = 16
    lora_alpha: float | None = None  # 2 * rank
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] | None = None  # None: every linear layer of the blocks
    frozen_weights: Literal["int8", "int4"] | None = None  # of the base; None: as they are

    # The data.
    row_format: RowFormat | None = None
    loss_on: LossOn = "answers"
    skip_bad_rows: bool = False
    packing: bool = True
    num_workers: int | None = None  # processes that tokenise; None: as many as help
    cache_dir: str | None = None  # None: inside the output directory

    dpo_beta: float = 0.1  # of preference pairs: how far from the reference an answer may go

    # Evaluation.
    eval_data: tuple[str, ...] = ()
    held_out: float = 0.0  # part of the data, where there is no eval_data
    eval_every: int | None = None  # None: at the end only

    # Checkpoints and logs.
    save_every: int | None = None  # None: at the end, and when asked to stop
    keep: int = 2  # 0: none is written, and the run cannot be resumed
    resume: bool = False
    log_every: int = 10
    tensorboard: bool | None = None  # None: where it is installed

    # The machine.
    device: str | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    disk: str | None = None
    dtype: Precision | None = None  # None: bf16 on a GPU, fp32 on a CPU
    state_format: Literal["fp32", "compact", "minimal"] = "fp32"
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data names no file")
        for name in ("model", "output"):
            if not getattr(self, name).strip():  # which would be the folder that one is in
                raise ValueError(f"{name} names no directory")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for name in ("epochs", "lora_alpha", "eps"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0, not {value}")
        if not -_MOST <= self.seed < _MOST:
            raise ValueError(f"seed must be a number of 64 bits, not {self.seed}")
        for name in ("beta1", "beta2", "lora_dropout", "held_out", "min_lr"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to below 1, not {getattr(self, name)}")
        kinds = {"schedule": Schedule, "on_non_finite": OnNonFinite, "dtype": Precision}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value not in get_args(kind) and (name, value) != ("dtype", None):
                choices = ", ".join(get_args(kind))
                raise ValueError(f"{name} must be one of {choices}, not {value!r}")
        for name in ("device_memory", "host_memory"):
            if getattr(self, name) is not None:
                parse_budget(getattr(self, name), what=name)
        if self.disk is not None:
            parse_disk(self.disk)
        if self.frozen_weights is not None and not self.lora:
            raise ValueError("frozen_weights is for the frozen base of LoRA: add --lora")
        if self.held_out and self.eval_data:
            raise ValueError("held_out takes a part of the data, eval_data a file: give one")
        if self.eval_every is not None and not (self.held_out or self.eval_data):
            raise ValueError("eval_every needs something to evaluate on: eval_data or held_out")
        if self.clip_in_two_passes and not self.clips:
            raise ValueError("clip_in_two_passes needs a max_grad_norm of more than 0")
        if self.save_every is not None and not self.keep:
            raise ValueError("save_every writes checkpoints and keep=0 none: give one")
        if self.seq_len is not None and self.tokens_per_step < self.seq_len:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is less than one sequence of "
                f"seq_len={self.seq_len}"
            )

    @property
    def learning_rate(self) -> float:
        if self.lr is not None:
            return self.lr
        return LORA_LR if self.lora else FULL_LR

    @property
    def clips(self) -> bool:
        return self.max_grad_norm > 0

    @property
    def gradients_wait(self) -> bool:
        return self.clips and not self.clip_in_two_passes


_AT_LEAST: dict[str, float] = {
    "max_steps": 1,
    "tokens_per_step": 2,
    "seq_len": 2,
    "lr": 0,
    "warmup": 0,
    "weight_decay": 0,
    "dpo_beta": 0,
    "max_grad_norm": 0,
    "lora_rank": 1,
    "num_workers": 1,
    "eval_every": 1,
    "save_every": 1,
    "keep": 0,
    "log_every": 1,
    "micro_batch": 1,
}


def settings_of(values: Mapping[str, Any]) -> TrainSettings:
    """Return settings from names and plain values; ValueError names what is not known."""
    known = {field.name: field for field in fields(TrainSettings)}
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f": {close[0]}?" if close else "; outcore train --help names them all"
            if name in USUAL_NAMES:
                hint = f": here it is {USUAL_NAMES[name]}"
            raise ValueError(f"unknown setting {name!r}{hint}")
    missing = [name for name in ("model", "data", "output") if values.get(name) is None]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}")
    of_lora = [name for name in values if name.startswith("lora_") and values[name] is not None]
    if of_lora and "lora" not in values:  # all parameters would be trained
        raise ValueError(f"{of_lora[0]} is for LoRA: add --lora")
    hints = get_type_hints(TrainSettings)
    typed = {name: _typed(name, value, hints[name]) for name, value in values.items()}
    for name in ("data", "eval_data", "output", "cache_dir"):  # others are looked for at home later
        if name in typed:
            typed[name] = _with_home(typed[name])
    return TrainSettings(**typed)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return ``value`` as the setting's type; ValueError says what it should have been."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = next(kind for kind in kinds if kind is not type(None))
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}")
    if get_origin(kind) is tuple:
        texts = (value,) if isinstance(value, str) else value
        if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
    elif kind is bool or kind is str:
        if isinstance(value, kind):
            return value
        if name in _BUDGETS and type(value) is int:  # bytes, which YAML takes for a number
            return str(value)
    elif not isinstance(value, bool):
        number = _number(value)  # YAML takes 1e-5 for text, since it has no dot
        if number is not None and (kind is float or number == int(number)):
            if kind is int and not -_MOST <= number < _MOST:
                raise ValueError(f"{name} must be a number of 64 bits, not {value}")
            with contextlib.suppress(OverflowError):
                return kind(number)
    raise ValueError(f"{name} must be {_KINDS.get(kind, 'a list of texts')}, not {value!r}")


_MOST = 2**63
_BUDGETS = ("device_memory", "host_memory")
_KINDS = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


def _with_home(paths: Any) -> Any:
    """Return a path, or several, with the home directory for ~, which no shell sees in a YAML file
    or behind the = of an option.
    """
    if isinstance(paths, tuple):
        return tuple(map(os.path.expanduser, paths))
    return paths if paths is None else os.path.expanduser(paths)


def _number(value: Any) -> float | None:
    if isinstance(value, (int, str)):
        with contextlib.suppress(ValueError):
            return int(value)  # as it is: beyond 2^53 a float would be another number
    try:
        number = float(value) if isinstance(value, (float, str)) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the names and values of a YAML file; dashes in names count as underscores."""
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{path} must hold names and values, such as `lr: 1e-5`")
        _refuse_nested(path, node)
        values = loader.construct_document(node)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no YAML file: it is not UTF-8") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    except (AttributeError, LookupError, RecursionError) as error:  # PyYAML's, at "!!bool maybe"
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    _refuse_twice(path, node)
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _refuse_nested(path: str | Path, node: Any) -> None:
    """A few lines of lists that name each other are gigabytes as soon as a message shows them."""
    import yaml

    for key, value in node.value:
        parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(part, yaml.ScalarNode) for part in parts):
            line = key.start_mark.line + 1
            raise ValueError(f"{path}, line {line}: a setting is one value, or a list of texts")


def _refuse_twice(path: str | Path, node: Any) -> None:
    """YAML would take the last of them, and the reader of the file perhaps the first."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if name in lines:
            raise ValueError(f"{path} has {name} twice, in line {lines[name]} and in line {line}")
        lines[name] = line


def overridden(from_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a file, with those that were given beside it in their place."""
    values = {**from_file, **given}
    if "epochs" in given and "max_steps" not in given:
        values.pop("max_steps", None)  # the file's would go before the epochs
    return values


def to_dict(settings: TrainSettings) -> dict[str, Any]:
    """Return plain values, for JSON."""
    return asdict(settings)


def with_seq_len(settings: TrainSettings, longest: int | None) -> TrainSettings:
    """Return the settings with a sequence length, which a model may bound."""
    if settings.seq_len is not None:
        return settings
    usual = min(2048, longest or 2048, settings.tokens_per_step)
    return replace(settings, seq_len=usual)
