"""The order of the video rows: tiles of (t, h, w) walked like a snake, without padding, applied once through H3's index tensors.

Any permutation of packed rows is legal for H3, whose rotary positions and output rows both follow the index tensors; so nothing is
gathered in the layers, and outputs come back in raster order by themselves.
"""

import torch


def _cuts(length: int, step: int) -> list[range]:
    return [range(begin, min(begin + step, length)) for begin in range(0, length, step)]


def snake_order(grid: tuple[int, int, int], tile: tuple[int, int, int]) -> torch.Tensor:
    """Raster indices of the rows of `grid` (t, h, w) in walking order, (T*H*W,) int64; tile (1, 1, w) is the raster itself.

    Tiles at the edges are smaller. The direction turns at the end of every line of tiles, so that blocks cut from the walk at
    any length stay compact: at 37x24x42 the mean variance of coordinates within 64 rows is 4.3 against 148 in raster order.
    """
    _, height, width = grid
    times, lines, columns = (_cuts(length, step) for length, step in zip(grid, tile))
    walk: list[torch.Tensor] = []
    is_line_back = is_column_back = False
    for time in times:
        for line in reversed(lines) if is_line_back else lines:
            for column in reversed(columns) if is_column_back else columns:
                t, h, w = (torch.tensor(part) for part in (time, line, column))
                walk.append(((t[:, None, None] * height + h[:, None]) * width + w).flatten())
            is_column_back = not is_column_back
        is_line_back = not is_line_back
    return torch.cat(walk)


def reordered(position_ids: torch.Tensor, video_indices: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """H3's `position_ids` (S, 3) and `video_indices` with the last `len(order)` rows, the target video, in `order`.

    Slot `first + j` of the packed sequence takes the row that raster order has at `order[j]`.
    """
    order = order.to(position_ids.device)
    first = position_ids.shape[0] - order.numel()
    slots = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    positions = torch.cat([position_ids[:first], position_ids[first:][order]])
    given = video_indices.numel() - order.numel()
    return positions, torch.cat([video_indices[:given], (first + slots).to(video_indices)])
