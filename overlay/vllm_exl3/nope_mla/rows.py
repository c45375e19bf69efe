"""What the geometries do to queries, candidate indices and results, in PyTorch. Capturable in CUDA graphs."""

import torch
import torch.nn.functional as F


def widen_query(query: torch.Tensor, heads: int, columns: int) -> torch.Tensor:
    """query [tokens, h, c] padded with zeros to [tokens, heads, columns]; the same tensor where nothing is missing."""
    missing = (columns - query.shape[2], heads - query.shape[1])
    return F.pad(query, (0, missing[0], 0, missing[1])) if any(missing) else query


def fit_candidates(rows: torch.Tensor, width: int, pool: int) -> torch.Tensor:
    """rows [tokens, n] int, -1 where empty, for a kernel that takes `width` candidates.

    The first `width` columns are whole pools of `pool` tokens, the lowest-ranked in the last of them
    (`put_lowest_last`), and behind them comes the tail of an incomplete pool. A row with a tail gives up its
    lowest-ranked pool for it; a row without keeps all pools. A tail is shorter than a pool, so it always fits.
    """
    if rows.shape[1] == width:
        return rows
    tail = rows[:, width : width + pool]
    last = torch.where(tail[:, :1] >= 0, tail, rows[:, width - pool : width])
    return torch.cat([rows[:, : width - pool], last], dim=1)


def put_lowest_last(logits: torch.Tensor, pools: torch.Tensor) -> None:
    """Swap the lowest-scored of each row's pools into the last column; an empty entry (-1) counts as lowest.

    logits [rows, all pools] float32, pools [rows, k] int32 in any order, changed in place.
    """
    if logits.shape[1] == 0 or pools.shape[0] == 0:
        return
    scores = logits.gather(1, pools.clamp(0, logits.shape[1] - 1).long())
    lowest = scores.masked_fill_(pools < 0, float("-inf")).argmin(1, keepdim=True)
    last = pools[:, -1:].clone()
    pools[:, -1:] = pools.gather(1, lowest)
    pools.scatter_(1, lowest, last)


def zero_empty(result: torch.Tensor, candidates: torch.Tensor) -> None:
    """Set result [tokens, heads, columns] to zero where a token has no candidate at all."""
    result.masked_fill_((candidates < 0).all(1)[:, None, None], 0)
