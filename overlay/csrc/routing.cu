// The tables of one step: which row goes where. Nothing is atomic: rows keep the order of their slots within an
// expert, so the same routing gives the same tables.
//
// Three phases: each block counts its slots by expert; one block lays out rows, tiles and chunks; each block places
// its slots. A step that one block can sort takes one launch for all three.
#include "kernels.h"

namespace exl3 {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32, kWarpSlots = kRouteSlots / kWarps;
static_assert(kThreads >= kMaxExperts, "the scans give each expert a thread");

// Local expert of a slot, or -1.
__device__ __forceinline__ int expert_of(const Problem& p, int slot) {
  if (slot >= p.tokens * p.top_k) return -1;
  int id = p.topk_ids[slot];
  if (id < 0 || id >= p.global_experts) return -1;
  int expert = p.expert_map ? p.expert_map[id] : id;
  return expert < p.experts ? expert : -1;
}

struct Slots {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int begin = blockIdx.x * kRouteSlots + warp * kWarpSlots;  // of this warp
};

// counts[warp][expert] of this block's slots.
__device__ void count(const Problem& p, const Slots& s, int* counts) {
  for (int i = threadIdx.x; i < kWarps * p.experts; i += kThreads) counts[i] = 0;
  __syncthreads();
  int experts[kWarpSlots / 32];
#pragma unroll
  for (int i = 0; i < kWarpSlots / 32; ++i) experts[i] = expert_of(p, s.begin + 32 * i + s.lane);
#pragma unroll
  for (int i = 0; i < kWarpSlots / 32; ++i) {
    uint32_t same = __match_any_sync(kAllLanes, experts[i]);
    bool first = (same & ((1u << s.lane) - 1)) == 0;
    if (experts[i] >= 0 && first) counts[s.warp * p.experts + experts[i]] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
}

__device__ void store_counts(const Problem& p, const Tables& t, const int* counts) {
  for (int expert = threadIdx.x; expert < p.experts; expert += kThreads) {
    int rows = 0;
    for (int w = 0; w < kWarps; ++w) rows += counts[w * p.experts + expert];
    t.starts[blockIdx.x * p.experts + expert] = rows;
  }
}

// Inclusive sum over the threads of the block.
__device__ int scan(int value) {
  __shared__ int totals[kWarps];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) totals[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value += totals[w];
  __syncthreads();
  return value;
}

__device__ void lay_out(const Problem& p, const Layout& l, const Tables& t) {
  __shared__ int total_rows, total_tiles, total_stored;
  const int expert = threadIdx.x, blocks = (p.tokens * p.top_k + kRouteSlots - 1) / kRouteSlots;
  int rows = 0;
  if (expert < p.experts) {
    for (int b = 0; b < blocks; ++b) rows += t.starts[b * p.experts + expert];
    if (rows < p.min_rows) rows = 0;
  }
  const int tiles = (rows + kTileRows - 1) / kTileRows, stored = padded_rows(rows);
  const int row_end = scan(rows), tile_end = scan(tiles), stored_end = scan(stored);
  const int first_row = row_end - rows, first_tile = tile_end - tiles, first_stored = stored_end - stored;
  if (threadIdx.x == kThreads - 1) total_rows = row_end, total_tiles = tile_end, total_stored = stored_end;
  if (expert < p.experts) {
    int next = first_row;
    for (int b = 0; b < blocks; ++b) {
      int& start = t.starts[b * p.experts + expert];
      int count = start;
      start = rows ? next : -1;
      next += count;
    }
    for (int i = 0; i < tiles; ++i) {
      int skipped = i * kTileRows;
      t.tiles[first_tile + i] = {expert, first_row + skipped, min(rows - skipped, kTileRows), first_stored + skipped,
                                 first_tile, tiles};
    }
  }
  __syncthreads();
  for (int tile = threadIdx.x; tile < total_tiles; tile += kThreads) {
    const Tile& own = t.tiles[tile];
    for (int i = 0; i < padded_rows(own.rows); i += kRowBlock) t.block_tile[(own.storage + i) / kRowBlock] = tile;
  }
  // A tile belongs to the chunk in which its storage begins.
  for (int i = threadIdx.x; i <= l.chunks; i += kThreads) {
    if (i * l.chunk_rows >= total_stored) t.header->chunk_tiles[i] = total_tiles;
  }
  for (int i = (first_stored + l.chunk_rows - 1) / l.chunk_rows; stored && i * l.chunk_rows < stored_end; ++i) {
    t.header->chunk_tiles[i] = first_tile + (i * l.chunk_rows - first_stored + kTileRows - 1) / kTileRows;
  }
  for (int i = threadIdx.x; i < 2 * kMaxChunks; i += kThreads) t.header->tickets[i] = 0;
  if (threadIdx.x == 0) t.header->rows = total_rows, t.header->tiles = total_tiles;
}

// Turns counts into the first row of each warp, and hands out rows from there.
__device__ void place(const Problem& p, const Tables& t, const Slots& s, int* counts) {
  for (int expert = threadIdx.x; expert < p.experts; expert += kThreads) {
    int next = t.starts[blockIdx.x * p.experts + expert];
    bool taken = next >= 0;
    for (int w = 0; w < kWarps; ++w) {
      int& count = counts[w * p.experts + expert];
      int rows = count;
      count = taken ? next : -1;
      next += rows;
    }
  }
  __syncthreads();
  int experts[kWarpSlots / 32];
#pragma unroll
  for (int i = 0; i < kWarpSlots / 32; ++i) experts[i] = expert_of(p, s.begin + 32 * i + s.lane);
#pragma unroll
  for (int i = 0; i < kWarpSlots / 32; ++i) {
    int slot = s.begin + 32 * i + s.lane;
    uint32_t same = __match_any_sync(kAllLanes, experts[i]), before = same & ((1u << s.lane) - 1);
    int* next = counts + s.warp * p.experts + max(experts[i], 0);
    int start = experts[i] >= 0 ? *next : -1;
    __syncwarp();
    int row = start >= 0 ? start + __popc(before) : -1;
    if (row >= 0 && before == 0) *next = start + __popc(same);
    __syncwarp();
    if (slot >= p.tokens * p.top_k) continue;
    t.slot_row[slot] = row;
    if (row < 0) continue;
    t.row_slot[row] = slot;
    t.row_weight[row] = p.topk_weights[slot];
  }
}

extern __shared__ int counts[];

__global__ void __launch_bounds__(kThreads) route_kernel(Problem p, Layout l, Tables t) {
  Slots s;
  count(p, s, counts);
  store_counts(p, t, counts);
  __syncthreads();
  lay_out(p, l, t);
  __syncthreads();
  place(p, t, s, counts);
}

__global__ void __launch_bounds__(kThreads) count_kernel(Problem p, Tables t) {
  count(p, Slots(), counts);
  store_counts(p, t, counts);
}

__global__ void __launch_bounds__(kThreads) lay_out_kernel(Problem p, Layout l, Tables t) { lay_out(p, l, t); }

__global__ void __launch_bounds__(kThreads) place_kernel(Problem p, Tables t) {
  Slots s;
  count(p, s, counts);
  place(p, t, s, counts);
}

}  // namespace

cudaError_t route(const Problem& p, const Layout& l, const Tables& t, cudaStream_t stream) {
  static_assert(sizeof(int) * kWarps * kMaxExperts <= 48 << 10);
  size_t bytes = sizeof(int) * kWarps * p.experts;
  int blocks = ceil_div(l.rows, kRouteSlots);
  if (blocks == 1) {
    route_kernel<<<1, kThreads, bytes, stream>>>(p, l, t);
  } else {
    count_kernel<<<blocks, kThreads, bytes, stream>>>(p, t);
    lay_out_kernel<<<1, kThreads, 0, stream>>>(p, l, t);
    place_kernel<<<blocks, kThreads, bytes, stream>>>(p, t);
  }
  return cudaGetLastError();
}

}  // namespace exl3
