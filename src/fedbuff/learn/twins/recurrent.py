"""LSTM, GRU and RNN."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedbuff.learn.kernels import (
    lstm,
    lstm_back,
    lstm_weights,
    needed,
    usable,
)
from fedbuff.learn.twins.dropout import dropout
from fedbuff.learn.twins.linear import grouped_linear, grouped_outer, linear, row_sums
from fedbuff.learn.twins.step import LocalStep, Slot, Twin


class RecurrentTwin(Twin):
    """LSTM, GRU and RNN: the inputs of all time steps are multiplied at once, the state step by step."""

    def flatten_parameters(self) -> None:
        """What a model's forward may call for a GPU's sake."""

    def setup(self, layer: Any) -> None:
        self.layers, self.directions = layer.num_layers, 2 if layer.bidirectional else 1
        self.batch_first, self.dropout, self.hidden = layer.batch_first, layer.dropout, layer.hidden_size
        self.kind = layer.mode
        self.cell = {
            "LSTM": _lstm_cell,
            "GRU": _gru_cell,
            "RNN_TANH": _rnn_cell(torch.tanh),
            "RNN_RELU": _rnn_cell(torch.relu),
        }[layer.mode]

    @staticmethod
    def why_not(layer: Any) -> str | None:
        return "has proj_size, which can't be batched" if layer.proj_size else None

    def forward(self, x: Tensor, state: object = None) -> Any:
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError("a recurrent layer saw packed sequences or an input without a batch dimension")
        x = x if self.batch_first else x.transpose(0, 1)
        if state is not None and not self.is_zero(state, len(x)):
            raise ValueError("a recurrent layer saw a starting state that is not zero")
        last = []
        for layer in range(self.layers):
            outputs = []
            for direction in range(self.directions):
                suffix = f"_l{layer}" + "_reverse" * direction
                last_one = layer == self.layers - 1 and self.directions == 1
                y, ends = self.one(x, suffix, backwards=bool(direction), time_first=last_one)
                outputs.append(y)
                last.append(ends)
            x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
            if self.dropout > 0 and self.training and layer < self.layers - 1:
                x = dropout(x, self.dropout, self.current.step, time_first=True)
        ends = tuple(torch.stack(part) for part in zip(*last, strict=True))
        x = x.transpose(0, 1).contiguous()  # in memory as torch has it, where it matters to dropout after this
        return x.transpose(0, 1) if self.batch_first else x, ends if self.kind == "LSTM" else ends[0]

    def is_zero(self, state: object, rows: int) -> bool:
        """Whether it is what a recurrent layer starts from anyway, spelled out: for these rows together, and so for each."""
        parts, shape = (state if isinstance(state, tuple) else (state,)), (self.layers * self.directions, rows, self.hidden)
        return len(parts) == (2 if self.kind == "LSTM" else 1) and all(
            isinstance(part, Tensor) and part.shape == shape and not part.requires_grad and not part.any() for part in parts
        )

    def one(self, x: Tensor, suffix: str, backwards: bool, time_first: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: [rows, time, features] to [rows, time, hidden], and the states at the end.

        `time_first` is how the result should lie in memory; it may not.
        """
        step, anchor = self.current.step, self.current.anchor
        from_input, weight = self.slots[f"weight_ih{suffix}"], self.slots[f"weight_hh{suffix}"]
        biases = [self.slots[name] for name in (f"bias_ih{suffix}", f"bias_hh{suffix}") if name in self.slots]
        if self.kind == "LSTM" and self.hidden % 2 == 0 and usable(x) is not None:
            h, c = _Lstm.apply(x, anchor, step, (from_input, weight), biases, backwards, time_first)  # type: ignore[no-untyped-call]
            return h, (h[:, 0 if backwards else -1], c)
        inputs = linear(x, self.current, from_input, biases[0] if biases else None)
        state = tuple(x.new_zeros(len(x), self.hidden) for _ in range(2 if self.kind == "LSTM" else 1))
        outputs: list[Tensor] = []
        times = range(x.shape[1])
        tape = Tape(weight, biases[1:])
        for t in reversed(times) if backwards else times:
            pushed = _Recurrent.apply(state[0], anchor, step, tape)  # type: ignore[no-untyped-call]
            state = self.cell(inputs[:, t], pushed, state)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if backwards else outputs, 1), state


class Tape:
    """Inputs and output gradients of a layer that is used once for every time step, for one weight gradient at the end."""

    def __init__(self, weight: Slot, biases: list[Slot]) -> None:
        self.weight, self.biases, self.steps = weight, biases, 0
        self.seen: list[tuple[Tensor, Tensor]] = []


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, anchor: Tensor, step: LocalStep, tape: Tape) -> Tensor:
        ctx.step, ctx.tape, ctx.first = step, tape, tape.steps == 0
        tape.steps += 1
        ctx.save_for_backward(h)
        b = tape.biases[0].weights(step) if tape.biases else None
        return grouped_linear(h.contiguous(), step.times(step.groups, len(h)), tape.weight.weights(step), b, step.low)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (h,), step, tape = ctx.saved_tensors, ctx.step, ctx.tape
        dy = grads[0].contiguous()
        tape.seen.append((dy, h))
        groups = step.times(step.groups, len(h))
        if ctx.first:  # the first step is the last to come here
            dys, hs = (torch.stack(part, 1) for part in zip(*tape.seen, strict=True))
            tape.seen.clear()
            recurrent_gradients(step, tape.weight, tape.biases, dys, hs)
            return None, None, None, None
        w = tape.weight.weights(step).transpose(1, 2)
        return grouped_linear(dy, groups, w, None, step.low), None, None, None


def recurrent_gradients(step: LocalStep, weight: Slot, biases: list[Slot], dy: Tensor, h: Tensor) -> None:
    """Gradients of W_hh and of biases from those of its outputs and the states it saw, both [rows, time, …]."""
    clients = step.times(step.clients, len(h))
    if weight.offset is not None:
        time = h.shape[1]
        times = [(a * time, b * time) for a, b in clients]
        grouped_outer(step, dy.flatten(0, 1), h.flatten(0, 1), times, weight.gradient(step))
    bias_gradients(step, biases, dy)


def bias_gradients(step: LocalStep, biases: list[Slot], dy: Tensor) -> None:
    trained = [bias for bias in biases if bias.offset is not None]
    if trained:
        sums, clients = dy.sum(1), step.times(step.clients, len(dy))
        for bias in trained:
            row_sums(sums, clients, bias.gradient(step))


class _Lstm(torch.autograd.Function):
    """One layer in one direction, from x [rows, time, features] to all h and the last c."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, step: LocalStep, weights: tuple[Slot, Slot], biases: list[Slot], backwards: bool,
        time_first: bool,
    ) -> Any:  # fmt: skip
        x = x.contiguous()
        w_in, w = (slot.weights(step) for slot in weights)
        b = biases[0].weights(step) + biases[1].weights(step) if biases else None
        groups = step.times(step.groups, len(x))
        h, gates, c, tanh_c = lstm(needed(), x, w_in, w, b, groups, backwards, time_first, step.low)
        ctx.save_for_backward(x, gates, h, c, tanh_c)
        ctx.step, ctx.weights, ctx.biases, ctx.backwards, ctx.used_up = step, weights, biases, backwards, False
        return h, c[:, 0 if backwards else -1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.used_up:
            raise ValueError(
                "the model or its loss goes back through an LSTM twice, but its gates are gone after the first time"
            )
        ctx.used_up = True
        (x, gates, h, c, tanh_c), step, (of_input, weight) = ctx.saved_tensors, ctx.step, ctx.weights
        groups, clients = (step.times(ranges, len(gates)) for ranges in (step.groups, step.clients))
        dh = grads[0] if grads[0].stride(2) == 1 else grads[0].contiguous()
        dc = grads[1].clone(memory_format=torch.contiguous_format)
        lstm_back(needed(), gates, weight.weights(step), c, tanh_c, dh, dc, groups, ctx.backwards, step.low)
        dgates = gates  # as they are now
        for slot, seen, before in ((weight, h, True), (of_input, x, False)):
            if slot.offset is not None:
                lstm_weights(needed(), dgates, seen, slot.gradient(step), clients, ctx.backwards, before, step.low)
        bias_gradients(step, ctx.biases, dgates)
        dx = None
        if ctx.needs_input_grad[0]:
            flat, w_in = dgates.flatten(0, 1), of_input.weights(step).transpose(1, 2)
            dx = grouped_linear(flat, step.times(step.groups, len(flat)), w_in, None, step.low).view(x.shape)
        return dx, None, None, None, None, None, None


Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def _lstm_cell(x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = (x + h).chunk(4, 1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_cell(x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    z, n = torch.sigmoid(xz + hz), torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    return (n + z * (state[0] - n),)


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda x, h, state: (activation(x + h),)
