"""Models that are born offloaded: from a config, or from a checkpoint on disk, unit by unit.

The whole model never exists in memory beside its homes: it is built on the meta device, and each
unit's values are made or read only when its home is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outcore.adapters import with_adapters
from outcore.blocks import Part
from outcore.engine.offload import offload, offload_from, resolve_options
from outcore.engine.offloaded import Engine
from outcore.engine.options import OffloadOptions
from outcore.engine.placement import Places
from outcore.engine.places import Place
from outcore.errors import StoreError, UnsupportedModel
from outcore.model_config import first_line, read_config, read_generation_config
from outcore.model_directory import is_hub_id, model_directory
from outcore.model_spec import auto_class as auto_class_of
from outcore.weights.checkpoint_files import CheckpointFiles, Wanted
from outcore.weights.converted import check_size, converted
from outcore.weights.stored_layout import StoredPiece, stored_layout
from outcore.weights.tied_tensors import check_tied
from outcore.weights.unused_tensors import tell_unused, unused_tensors


def from_config(
    config: Any, *, auto_class: Any = None, adapters: Any = None, **options: Any
) -> Any:
    """Return a new, randomly initialised model of ``config``, offloaded with ``options``.

    Weights are drawn by the model's own initialisation, on the compute device, from torch's
    generator there: seed it with ``torch.manual_seed``.
    adapters: a ``peft.LoraConfig``; the model is then PEFT's, with a frozen base. With
    ``frozen_weights`` and no adapters the whole model is frozen.
    """
    if adapters is None:
        checked, plan = resolve_options(config, **options)
        base = _on_meta(config, auto_class)
        model = _frozen_if_packed(base, options)
    else:
        base = _on_meta(config, auto_class)
        model = with_adapters(base, adapters)
        checked, plan = resolve_options(model, **options)
    model = offload_from(model, checked, source=_Initialised(base, checked), plan=plan)
    _fill_meta_buffers(base, checked.device)
    _initialise_containers(base, model._outcore_engine)
    return model


def load(
    directory: str | Path, *, auto_class: Any = None, adapters: Any = None, **options: Any
) -> Any:
    """Return the model of a Hugging Face directory or Hub id, offloaded with ``options``.

    safetensors files only; no pickle is read and no code from the directory is run.
    adapters: as for ``from_config``.
    """
    path = model_directory(directory)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path} is no Hugging Face model directory: it has no config.json. A model on the Hub "
            'is named by its id, "org/name".'
        )
    config = read_config(path / "config.json")
    if is_hub_id(directory):
        config.name_or_path = str(directory)  # adapters name their base, elsewhere too
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise UnsupportedModel(
            f"{path} is quantized ({quantization.get('quant_method', 'unknown method')}): only "
            "fp32, bf16, fp16 and fp64 weights can be loaded. Dequantize it and save it first."
        )
    if getattr(config, "transformers_weights", None):
        raise UnsupportedModel(
            f"{path}: its config names a file of weights (transformers_weights); only those of the "
            "usual names are read"
        )
    if (path / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"{path} has adapters (adapter_config.json) beside its weights, and would be another "
            "model without them: merge them into it (PEFT's merge_and_unload), or move them away"
        )
    generation_config = read_generation_config(path)
    files = CheckpointFiles(path)
    resolved = None if adapters is not None else resolve_options(path, **options)
    try:
        base = _on_meta(config, auto_class)
    except Exception as error:  # whatever its class raises about values that cannot be
        file = path / "config.json"
        raise StoreError(f"{file}: makes no model ({first_line(error)})", path=file) from error
    layout = stored_layout(base, files)
    if layout is None:
        # Shapes differ, or something is missing: transformers converts the files.
        check_size(base, files.num_elements, path)
        base = converted(
            auto_class or auto_class_of(config),
            path,
            unlike=files.unlike(base),
            is_whole=auto_class is None,
        )
        base.name_or_path = config.name_or_path
        model = _frozen_if_packed(base, options)
        if adapters is not None:
            model = with_adapters(base, adapters)
        return offload(model, **options)
    check_tied(base, files, layout, path)
    if auto_class is None:  # another class may have no place for a head
        tell_unused(unused_tensors(base, files, layout), path)
    pieces = {id(parameter): layout[name] for name, parameter in base.named_parameters()}
    model = _frozen_if_packed(base, options)
    if adapters is not None:
        model = with_adapters(base, adapters)
    checked, plan = resolved or resolve_options(model, **options)
    stored = _Stored(files, pieces, checked.device)
    model = offload_from(model, checked, source=stored, plan=plan)
    _fill_meta_buffers(base, checked.device)
    files.load_buffers(base, {name: found[0].name for name, found in layout.items()})
    if generation_config is not None:
        base.generation_config = generation_config
    model.eval()
    return model


def _frozen_if_packed(base: Any, options: dict[str, Any]) -> Any:
    """Freeze a model whose frozen weights are to be packed: nobody else can, before it is there."""
    return base if options.get("frozen_weights") is None else base.requires_grad_(False)


class _Stored:
    """Reads each part's values from files, found before adapters gave parameters other names."""

    is_on_host = True

    def __init__(
        self,
        files: CheckpointFiles,
        pieces: dict[int, list[StoredPiece]],
        device: torch.device,
    ) -> None:
        self._files = files
        self._pieces = pieces  # by the parameter's id
        self._device = device

    def is_wider_than_bf16(self, part: Part) -> bool:
        on_meta = [p for p in part.parameters.values() if p.is_meta]
        names = [piece.name for p in on_meta for piece in self._pieces[id(p)]]
        return any(self._files.is_wider_than_bf16(name) for name in names)

    def fill(self, wanted: Sequence[tuple[Part, Places]]) -> Iterator[Part]:
        parts = {id(part): part for part, _ in wanted}
        tensors = [
            Wanted(
                name=piece.name,
                put=partial(_put_behind, place, piece.first),
                run_numel=place.run_numel,
                owner=id(part),
                memory=None if place.memory is None else place.memory[piece.first :],
            )
            for part, places in wanted
            for name, place in places.items()
            for piece in self._pieces[id(part.parameters[name])]
        ]
        for owner in self._files.read(tensors, pin=self._device.type == "cuda"):
            assert isinstance(owner, int)
            yield parts[owner]


def _put_behind(place: Place, start: int, values: Tensor, first: int) -> None:
    place.put(values, start + first)


def _on_meta(config: Any, auto_class: Any) -> Any:
    auto = auto_class or auto_class_of(config)
    with torch.device("meta"):
        return auto.from_config(config)


class _Initialised:
    """Makes each part's values with the model's own initialisation, on the compute device."""

    def __init__(self, model: nn.Module, options: OffloadOptions) -> None:
        self._rules = _rules(model)
        self._device = options.device

    @property
    def is_on_host(self) -> bool:
        return self._device.type == "cpu"

    def is_wider_than_bf16(self, part: Part) -> bool:
        return False  # a random draw loses nothing by being rounded

    def fill(self, wanted: Sequence[tuple[Part, Places]]) -> Iterator[Part]:
        for part, places in wanted:
            values = self._values(part)
            for name, place in places.items():
                place.put(values.pop(name).reshape(-1), 0)
            del values
            yield part

    def _values(self, part: Part) -> dict[str, Tensor]:
        modules = list(_children_first(part.module)) if part.is_block else [part.module]
        for module in modules:
            own = list(module.parameters(recurse=False))
            _make_room(module, self._device)
            if not own or any(parameter.is_meta for parameter in own):  # else it has its values
                _initialise(self._rules[module], module)
        return {
            name: parameter.detach()
            for name, parameter in part.module.named_parameters(recurse=part.is_block)
        }


def _make_room(module: nn.Module, device: torch.device) -> None:
    """Give the module's own tensors that are on meta memory on ``device``."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            empty = torch.empty_like(parameter, device=device)
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """As transformers does: a parent's rule (scaled projections) goes over its children's."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _initialise_containers(model: Any, engine: Engine) -> None:
    """Apply the rules of modules that own no parameter but set those of others (T5's head)."""
    inside = {id(m) for u in engine.units if u.part.is_block for m in u.part.module.modules()}
    rules = _rules(model)
    for module in _children_first(model):
        if id(module) not in inside and next(module.children(), None) is not None:
            _initialise(rules[module], module)
    engine.weights_replaced()


def _rules(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the model whose rules each module follows: the innermost, as in transformers.

    One that is made of several (a tower for images, and a language model) knows its own alone.
    """
    rules: dict[nn.Module, nn.Module] = {}
    for module in model.modules():  # what is inside comes later
        if module is model or hasattr(module, "_init_weights"):
            rules |= dict.fromkeys(module.modules(), module)
    return rules


def _initialise(rules: Any, module: nn.Module) -> None:
    with torch.no_grad():
        if hasattr(rules, "_init_weights"):
            rules._init_weights(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def _fill_meta_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds, such as rotary frequencies."""
    rules = _rules(model)
    for module in model.modules():
        empty = [name for name, buffer in module._buffers.items() if _is_meta(buffer)]
        for name in empty:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = torch.zeros_like(buffer, device=device)
        if empty:
            valued: list[Any] = list(module.parameters())  # a rule may go over its children too
            for parameter in valued:
                parameter._is_hf_initialized = True
            _initialise(rules[module], module)
            for parameter in valued:  # of a new model, containers' rules are still to come
                parameter._is_hf_initialized = False


def _is_meta(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.is_meta
