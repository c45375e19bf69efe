"""exllamav3's way with many rows, to be measured against: dequantise groups of experts, batched GEMMs, one gather.

Made of 1.6.5's own functions in the order and with the limits of its `moe_batch_recon` defaults. It reads the number
of rows of every expert on the host, as 1.6.5 does, so it cannot be captured in a graph.
"""

from itertools import accumulate

import torch
from vllm_exl3.few_rows import FusedExperts, routing_tables

GROUP_EXPERTS = 16
GROUP_ROWS = 16_384  # padding included
GROUP_PADDING = 1.1  # padded rows over real ones


def plan_groups(counts: list[int], most_fused: int) -> list[list[int]]:
    """Experts with more than `most_fused` rows, fullest first, in groups whose rows are padded to the fullest's."""
    heavy = sorted((expert for expert, rows in enumerate(counts) if rows > most_fused), key=lambda e: -counts[e])
    groups: list[list[int]] = []
    for expert in heavy:
        group = groups[-1] if groups else []
        padded = (len(group) + 1) * counts[group[0]] if group else 0
        real = sum(counts[other] for other in group) + counts[expert]
        if group and len(group) < GROUP_EXPERTS and padded <= min(GROUP_ROWS, GROUP_PADDING * real):
            group.append(expert)
        else:
            groups.append([expert])
    return groups


class DequantisedExperts:
    """A layer's experts, those with at most `most_fused` rows through exl3_moe, the others dequantised.

    `fused` needs `cap == most_fused` and `partition_tokens` as many as there will be tokens, unless `most_fused` is 0,
    which dequantises all. 1.6.5's default is 128.
    """

    def __init__(self, fused: FusedExperts, most_fused: int) -> None:
        self.fused, self.most_fused, self.ext = fused, most_fused, fused.ext

    def run(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        """As FusedExperts.run, of any number of tokens."""
        if self.most_fused:
            self.fused.run_partition(x, topk_ids, topk_weights, out)
        else:
            out.zero_()
        geometry, slots = self.fused.geometry, topk_ids.numel()
        ramp = torch.arange(max(slots, geometry.experts + 2), device=x.device)
        t = routing_tables(topk_ids, topk_weights, geometry.experts, 0, ramp)
        counts = t.count[:-1].tolist()
        groups = plan_groups(counts, self.most_fused)
        sizes = [len(group) * counts[group[0]] for group in groups]
        scratch = torch.empty(sum(sizes), geometry.hidden, device=x.device)
        padded_x = torch.cat([x, x.new_zeros(1, geometry.hidden)])
        padded_token = torch.cat([t.token, t.token.new_full((1,), x.shape[0])])
        base, kind = [0] * geometry.experts, [0] * geometry.experts
        for group, size, first in zip(groups, sizes, accumulate(sizes, initial=0), strict=False):
            rows = counts[group[0]]
            chosen = torch.tensor(group).to(x.device, non_blocking=True)
            place = ramp[:rows].expand(len(group), rows)
            index = torch.where(place < t.count[chosen, None], place + t.start[chosen, None], slots)
            self._group(padded_x[padded_token[index]], chosen, scratch[first : first + size])
            for number, expert in enumerate(group):
                base[expert], kind[expert] = first + number * rows, 2  # 2: the gather applies the route weights
        tables = torch.tensor([base, kind]).to(x.device)
        self.ext.exl3_moe_gather(out, scratch, t.expert_of_slot, t.place, t.start, tables[0], tables[1], t.weight)

    def _group(self, rows: torch.Tensor, chosen: torch.Tensor, slab: torch.Tensor) -> None:
        """rows fp16 [experts, rows, hidden] -> slab fp32 [experts * rows, hidden]."""
        geometry = self.fused.geometry
        count, height, hidden = rows.shape
        up = self._product(rows, self._weights(chosen, 1, hidden, geometry.width))
        gate = self._product(rows, self._weights(chosen, 0, hidden, geometry.width))
        flat = up.view(-1, geometry.width)
        self.ext.silu_mul(gate.view(-1, geometry.width), flat, flat, self.fused.limit)
        weights = self._weights(chosen, 2, geometry.width, hidden)
        self.ext.hgemm_batched(up, weights, slab.view(count, height, hidden))

    def _weights(self, chosen: torch.Tensor, projection: int, in_features: int, out_features: int) -> torch.Tensor:
        made = torch.empty(len(chosen), in_features, out_features, dtype=torch.float16, device=chosen.device)
        tables = [table[chosen] for table in self.fused.tables[3 * projection : 3 * projection + 3]]
        self.ext.reconstruct_had_batch(made, *tables, self.fused.bits[projection], *self.fused.flags)
        return made

    def _product(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.empty(*rows.shape[:2], weights.shape[2], dtype=torch.float16, device=rows.device)
        self.ext.hgemm_batched(rows, weights, made)
        return made
