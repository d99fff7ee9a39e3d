"""The device's sampler in NumPy: parameters by slot, and sampled tokens where penalties need them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from emberline.kernels import decode_inputs as inputs
from emberline.kernels.sampling import sample as reference_sample


class HostTable:
    def __init__(self):
        self.rows, self.banned, self.allowed, self.outputs = {}, {}, {}, {}
        self.set_now, self.n_uploads = {}, 0

    def set(self, slot, row):
        self.set_now[slot] = row
        self.banned[slot] = ()

    def ban(self, slot, ids):
        self.banned[slot] = ids

    def allow(self, slots, bits):
        self.allowed = {}
        for slot, mask in zip(slots, bits):
            self.allowed.setdefault(slot, []).append(mask)

    def upload(self):
        self.n_uploads += 1
        for slot, row in self.set_now.items():
            self.rows[slot] = row
            self.outputs[slot] = None if row.output_ids is None else row.output_ids.tolist()
        self.set_now = {}


class HostKernels:
    """What `emberline.kernels.gpu` does for a runner, without a device."""

    prepare = staticmethod(inputs.prepare)
    keep = staticmethod(inputs.keep)

    def __init__(self):
        self.sampled_rows = []
        self.n_accepted = 0

    def sample(self, logits, table, slots, positions, out, guided=False, token_ids=None, offsets=None):
        assert not table.set_now, "sampled before it was uploaded"
        if not guided:
            out.token_ids.fill_(-7)
        for r, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
            if slot < 0 or table.rows[slot].guided != guided:
                continue
            history = table.outputs[slot]
            draw = 0 if offsets is None else int(offsets[r])
            drafts = [] if token_ids is None else token_ids[r - draw + 1 : r + 1].tolist()
            if history is not None and drafts:
                history = history + drafts  # a copy: `accept` says what was drawn
            masks = table.allowed.get(slot)
            row = replace(
                table.rows[slot],
                position=position,
                banned=table.banned[slot],
                allowed=None if masks is None else masks[draw],
                output_ids=None if history is None else np.array(history, np.uint32),
            )
            self.sampled_rows.append(row)
            [sampled] = reference_sample(logits[r : r + 1].clone(), [row])
            out.token_ids[r] = sampled.token_id
            if history is not None and offsets is None:
                history.append(sampled.token_id)
            if sampled.logprob is not None:
                out.logprob[r] = sampled.logprob
                for n, (token_id, logprob) in enumerate(sampled.top):
                    out.top_ids[r, n], out.top_logprobs[r, n] = token_id, logprob
        if guided:
            table.allowed = {}

    def accept(self, draws, to, table, state, n_rows, guided=False):
        starts = to.starts.tolist()
        real = [to.slots[first].item() if first < stop else -1 for first, stop in pairwise(starts[: n_rows + 1])]
        mine = [slot >= 0 and table.rows[slot].guided == guided for slot in real]
        masked = replace(to, slots=to.slots.clone())
        for row in range(n_rows):
            if not mine[row]:
                masked.slots[starts[row] : starts[row + 1]] = -1
        for slot, counted in zip(real, inputs.accept(draws, masked, state, n_rows)):
            self.n_accepted += max(0, len(counted) - 1)
            if counted and table.outputs[slot] is not None:
                table.outputs[slot] += counted


def as_int32(values):
    return torch.tensor(values, dtype=torch.int32)
