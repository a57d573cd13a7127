"""Layouts of spans: aligned, disjoint, trainable first, and views that find their values."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outcore.store.spans import ALIGN_ELEMENTS, SpanLayout

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
parameters = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=1, max_size=6),
    st.tuples(shapes, st.booleans()),
    min_size=1,
    max_size=8,
).map(
    lambda entries: {
        name: nn.Parameter(torch.zeros(shape), requires_grad=trainable)
        for name, (shape, trainable) in entries.items()
    }
)


@given(parameters)
def test_fields_are_aligned_disjoint_and_complete(parameters: dict[str, nn.Parameter]) -> None:
    layout = SpanLayout.of(parameters)
    assert sorted(f.name for f in layout.fields) == sorted(parameters)
    end = 0
    for field in layout.fields:
        assert field.offset % ALIGN_ELEMENTS == 0
        assert field.offset >= end
        assert field.offset - end < ALIGN_ELEMENTS
        assert field.numel == parameters[field.name].numel()
        assert field.trainable == parameters[field.name].requires_grad
        end = field.end
    assert end <= layout.numel < end + ALIGN_ELEMENTS
    assert layout.numel % ALIGN_ELEMENTS == 0


@given(parameters)
def test_the_trainable_fields_are_a_prefix(parameters: dict[str, nn.Parameter]) -> None:
    layout = SpanLayout.of(parameters)
    for field in layout.fields:
        assert (field.end <= layout.trainable_numel) == field.trainable
        assert field.trainable or field.offset >= layout.trainable_numel
    names = [name for name, p in parameters.items() if p.requires_grad]
    assert [f.name for f in layout.trainable] == names, "not in the order of definition"


@given(parameters, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 3))
def test_views_and_separate_tensors_share_the_span(
    parameters: dict[str, nn.Parameter], dtype: torch.dtype, before: int
) -> None:
    layout = SpanLayout.of(parameters)
    whole = torch.zeros(before * 128 + layout.numel, dtype=dtype)
    flat = whole[before * 128 :]
    for number, (name, view) in enumerate(layout.views(flat).items(), start=1):
        assert view.shape == parameters[name].shape
        view.fill_(number)
    views, separate = layout.views(flat), layout.separate(flat)
    for name in parameters:
        assert torch.equal(views[name], separate[name])
        assert views[name].data_ptr() == separate[name].data_ptr()
    addresses = {t.untyped_storage().data_ptr() for t in separate.values()}
    assert len(addresses) == len(parameters), "a writer of checkpoints would take them for tied"
    next(iter(separate.values())).fill_(99)
    assert 99 in flat


@given(parameters)
def test_the_layout_is_a_function_of_the_parameters(parameters: dict[str, nn.Parameter]) -> None:
    assert SpanLayout.of(parameters) == SpanLayout.of(dict(parameters))
