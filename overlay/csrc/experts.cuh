// The grouped GEMM over trellis weights: gate and up with the activation, and down.
//
// A tile is up to 128 rows of one expert times two streams of 128 columns: gate and up, or two neighbouring
// blocks of down. Eight warps share it along the columns, so each weight is decoded once, straight into the
// registers that the tensor cores read, and used for all rows. Two more warps only keep the copy engine busy: they
// run ahead of the arithmetic across tiles, through a ring for rows and a deeper one for weights.
//
// The grid is persistent and takes tickets, so uneven tiles even out. Which block computes a tile does not change
// its result, and blocks never wait for each other.
#pragma once

#include "kernels.h"
#include "trellis.h"

namespace exl3 {

enum class Pass { kGateUp, kGateUpSeparate, kDown };  // separate: gate and up have inputs of their own

constexpr int kComputeWarps = 8, kComputeThreads = kComputeWarps * 32;
// Registers move between groups of four warps, so the two copying warps come with a whole group.
constexpr int kGroupThreads = 128, kBlockThreads = kComputeThreads + kGroupThreads;
constexpr int kComputeRegisters = 224, kCopyRegisters = 56;
constexpr int kLaunchRegisters = (64 << 10) / kBlockThreads / 8 * 8;  // what the compiler may give each thread at first
static_assert(kComputeThreads * kComputeRegisters + kGroupThreads * kCopyRegisters <= kBlockThreads * kLaunchRegisters,
              "a block that asks for more than it was launched with waits for ever");
constexpr int kBlocks = kTileRows / kRowBlock;  // of 16 rows in a tile
constexpr int kStreams = 2;
constexpr int kEpilogueRows = 32;
constexpr int kQueue = 4;  // tiles that the copying warps may be ahead
constexpr int kRingBytes = 64 << 10;

template <class D, Pass kPass>
struct Rings {
  static constexpr int kInputs = kPass == Pass::kGateUpSeparate ? 2 : 1;
  static constexpr int kRowStage = kInputs * kTileRows * kStepBytes;
  static constexpr int kRowStages = kInputs == 2 ? 2 : 4;
  static constexpr int kTileBytes = D::kStageTileBytes;  // at most
  static constexpr int kWeightStage = kStreams * (kStep / kTile) * (kBlock / kTile) * kTileBytes;
  static constexpr int kLeft = (kRingBytes - kRowStages * kRowStage) / kWeightStage;
  static constexpr int kWeightStages = kLeft >= 8 ? 8 : kLeft >= 4 ? 4 : 2;
  static_assert(kRowStages * kRowStage + kWeightStages * kWeightStage <= kRingBytes);
};

struct Job {
  int tile;   // -1: no more
  int panel;  // of 128 columns (gate and up) or 256 (down)
};

template <class D, Pass kPass>
struct Shared {
  using R = Rings<D, kPass>;
  alignas(128) char rows[R::kRowStages][R::kRowStage];
  alignas(128) char weights[R::kWeightStages][R::kWeightStage];
  alignas(128) float epilogue[kEpilogueRows][kStreams * kBlock];
  alignas(16) half vectors[2][3][kBlock];  // by parity of the tile: svh of both streams, suh of the next product
  Job jobs[kQueue];
  alignas(8) uint64_t rows_full[R::kRowStages], rows_empty[R::kRowStages], weights_full[R::kWeightStages],
      weights_empty[R::kWeightStages], jobs_full[kQueue], jobs_empty[kQueue];
};

struct Arguments {
  Problem p;
  Layout l;
  Tables t;
  int part;  // chunk of gate and up, slice of down
};

template <Pass kPass>
struct Shape {
  int inner, outer;  // of the product
  int first_tile, end_tile, panels, first_panel;
  int stored_before;  // stored rows before the first tile's, in the operand
  int* ticket;

  __device__ explicit Shape(const Arguments& a) {
    const Header& h = *a.t.header;
    if constexpr (kPass == Pass::kDown) {
      inner = a.p.width, outer = a.p.hidden;
      first_tile = 0, end_tile = h.tiles;
      first_panel = a.part * (a.l.slice / (2 * kBlock));
      panels = min(a.l.slice / (2 * kBlock), (outer + 2 * kBlock - 1) / (2 * kBlock) - first_panel);
      stored_before = 0;
      ticket = &a.t.header->tickets[kMaxChunks + a.part];
    } else {
      inner = a.p.hidden, outer = a.p.width;
      first_tile = h.chunk_tiles[a.part], end_tile = h.chunk_tiles[a.part + 1];
      first_panel = 0, panels = outer / kBlock;
      stored_before = first_tile < end_tile ? a.t.tiles[first_tile].storage : 0;
      ticket = &a.t.header->tickets[a.part];
    }
  }

  // Tiles of one expert that share a panel follow each other: all but the first find its weights in the cache.
  __device__ Job job(const Arguments& a, int number) const {
    int guess = first_tile + number / panels;
    if (guess >= end_tile) return {-1, 0};
    const Tile& tile = a.t.tiles[guess];
    int first = max(tile.first, first_tile), count = min(tile.first + tile.count, end_tile) - first;
    int within = number - (first - first_tile) * panels;
    return {first + within % count, first_panel + within / count};
  }
};

// Counts the stages of a ring: which one is next, and the parity of its barriers.
template <int kStages>
struct Position {
  uint32_t count = 0;
  __device__ uint32_t stage() const { return count % kStages; }
  __device__ uint32_t parity() const { return count / kStages & 1; }
};

// The two copying warps keep the rings full, ahead of the arithmetic and across tiles. Their loops are short because
// one warp alone issues an instruction only every few cycles. This one takes the tickets.
template <class D, Pass kPass>
__device__ __forceinline__ void feed_weights(const Arguments& a, const Shape<kPass>& shape, Shared<D, kPass>& shared) {
  using R = Rings<D, kPass>;
  constexpr int kBands = kStep / kTile;
  const Problem& p = a.p;
  const int lane = threadIdx.x % 32, steps = shape.inner / kStep, tile_size = tile_bytes(p.bits_x2);
  const int bytes = kBlock / kTile * tile_size;  // of one band of 16 rows of one stream
  const int64_t band = int64_t{shape.outer / kTile} * tile_size;
  // A lane a piece: both streams of down are neighbours in memory, gate and up are not.
  constexpr int kPieces = kPass == Pass::kDown ? kBands : kBands * kStreams;
  const int stream = kPass == Pass::kDown ? 0 : lane % kStreams, k = kPass == Pass::kDown ? lane : lane / kStreams;
  const uint32_t target = ptx::shared_address(shared.weights[0]) + (k * kStreams + stream) * bytes;

  Position<R::kWeightStages> position;
  for (int number = 0;; ++number) {
    int q = number % kQueue, ticket = lane == 0 ? atomicAdd(shape.ticket, 1) : 0;
    const Job job = shape.job(a, __shfl_sync(kAllLanes, ticket, 0));
    ptx::barrier_wait(ptx::shared_address(&shared.jobs_empty[q]), number / kQueue & 1 ^ 1);
    if (lane == 0) {
      shared.jobs[q] = job;
      ptx::barrier_arrive(ptx::shared_address(&shared.jobs_full[q]));
    }
    if (job.tile < 0) return;
    const Projection& w = kPass == Pass::kDown ? p.down : stream ? p.up : p.gate;
    const int streams = kPass == Pass::kDown && (job.panel * 2 + 1) * kBlock >= shape.outer ? 1 : kStreams;
    const int piece = kPass == Pass::kDown ? streams * bytes : bytes;
    const char* source = reinterpret_cast<const char*>(w.trellis + int64_t{a.t.tiles[job.tile].expert} * w.trellis_stride) +
                         int64_t{job.panel * (kPass == Pass::kDown ? kStreams : 1)} * bytes + k * band;
    for (int step = 0; step < steps; ++step) {
      const uint32_t stage = position.stage(), full = ptx::shared_address(&shared.weights_full[stage]);
      ptx::barrier_wait(ptx::shared_address(&shared.weights_empty[stage]), position.parity() ^ 1);
      if (lane == 0) ptx::barrier_expect(full, kPieces * piece);
      __syncwarp();
      if (lane < kPieces) ptx::copy_bulk(target + stage * R::kWeightStage, source, piece, full);
      source += kBands * band;
      ++position.count;
    }
  }
}

template <class D, Pass kPass>
__device__ __forceinline__ void feed_rows(const Arguments& a, const Shape<kPass>& shape, Shared<D, kPass>& shared) {
  using R = Rings<D, kPass>;
  const int lane = threadIdx.x % 32, steps = shape.inner / kStep;
  const char* operand = static_cast<const char*>(a.p.workspace) + (kPass == Pass::kDown ? a.l.inner : a.l.gathered) +
                        lane * (int64_t{a.l.chunk_rows} + kTileRows) * shape.inner * 2;  // a lane an input
  const uint32_t target = ptx::shared_address(shared.rows[0]) + lane * kTileRows * kStepBytes;

  Position<R::kRowStages> position;
  for (int number = 0;; ++number) {
    int q = number % kQueue;
    ptx::barrier_wait(ptx::shared_address(&shared.jobs_full[q]), number / kQueue & 1);
    const Job job = shared.jobs[q];
    __syncwarp();
    ptx::barrier_arrive(ptx::shared_address(&shared.jobs_empty[q]));
    if (job.tile < 0) return;
    const Tile tile = a.t.tiles[job.tile];
    const int bytes = padded_rows(tile.rows) * kStepBytes;
    const char* source = operand + int64_t{tile.storage - shape.stored_before} * shape.inner * 2;
    for (int step = 0; step < steps; ++step) {
      const uint32_t stage = position.stage(), full = ptx::shared_address(&shared.rows_full[stage]);
      ptx::barrier_wait(ptx::shared_address(&shared.rows_empty[stage]), position.parity() ^ 1);
      if (lane == 0) ptx::barrier_expect(full, R::kInputs * bytes);
      __syncwarp();
      if (lane < R::kInputs) ptx::copy_bulk(target + stage * R::kRowStage, source, bytes, full);
      source += bytes;
      ++position.count;
    }
  }
}

// A step is two products of 16 of the inner dimension. While one is in the tensor cores, the operand of the next is
// decoded in the same basic block, so that the compiler can lay one beside the other. Four steps are unrolled: then
// the places in the rings are known at compile time.
template <class D, Pass kPass, int kActive>
__device__ __forceinline__ void multiply(
    float (&sums)[kBlocks][kStreams][2][4], const D& decoder, Shared<D, kPass>& shared, int steps, int tile_size,
    Position<Rings<D, kPass>::kRowStages>& row_position, Position<Rings<D, kPass>::kWeightStages>& weight_position) {
  using R = Rings<D, kPass>;
  constexpr int kUnroll = 4;
  static_assert(kBlock / kStep == kUnroll && kUnroll % R::kRowStages == 0, "whole groups of steps, whole rounds");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t row_base = ptx::shared_address(shared.rows[0]), rows_full = ptx::shared_address(shared.rows_full);
  const uint32_t weight_base = ptx::shared_address(shared.weights[0]) + warp * tile_size;
  const uint32_t weights_full = ptx::shared_address(shared.weights_full);
  const uint32_t band = kStreams * (kBlock / kTile) * tile_size;
  const uint32_t offsets[2] = {static_cast<uint32_t>(swizzled(lane % 16, lane / 16)),
                               static_cast<uint32_t>(swizzled(lane % 16, lane / 16 + 2))};

  auto decode = [&](uint32_t (&operand)[kStreams][4], uint32_t tiles) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const auto words = decoder.load(tiles + s * (kBlock / kTile) * tile_size);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) operand[s][pair] = decoder.pair(words, pair);
    }
  };
  auto product = [&](const uint32_t (&operand)[kStreams][4], uint32_t rows) {
#pragma unroll
    for (int i = 0; i < kActive; ++i) {
      uint32_t a[R::kInputs][4];
#pragma unroll
      for (int input = 0; input < R::kInputs; ++input) {
        ptx::load_matrices(a[input], rows + input * kTileRows * kStepBytes + i * kRowBlock * kStepBytes);
      }
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        ptx::multiply_add(sums[i][s][0], a[s % R::kInputs], operand[s][0], operand[s][1]);
        ptx::multiply_add(sums[i][s][1], a[s % R::kInputs], operand[s][2], operand[s][3]);
      }
    }
  };
  // Every lane arrives for what it has read itself: as fast as one for all, and racecheck can follow it.
  auto release = [](uint64_t& barrier) {
    __syncwarp();
    ptx::barrier_arrive(ptx::shared_address(&barrier));
  };

  uint32_t first[kStreams][4], second[kStreams][4];
  ptx::barrier_wait(weights_full + 8 * weight_position.stage(), weight_position.parity());
  decode(first, weight_base + weight_position.stage() * R::kWeightStage);
#pragma unroll 1
  for (int left = steps; left > 0; left -= kUnroll) {
    const uint32_t weight_stage = weight_position.stage();  // of the group's first step
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const uint32_t row_stage = j % R::kRowStages, rows = row_base + row_stage * R::kRowStage;
      const uint32_t stage = R::kWeightStages > kUnroll ? weight_stage + j : j % R::kWeightStages;
      ptx::barrier_wait(rows_full + 8 * row_stage, row_position.parity());
      decode(second, weight_base + stage * R::kWeightStage + band);
      product(first, rows + offsets[0]);
      release(shared.weights_empty[stage]);
      ++weight_position.count;
      if (j + 1 < kUnroll || left > kUnroll) {
        const uint32_t next = j + 1 == kUnroll               ? weight_position.stage()
                              : R::kWeightStages > kUnroll ? stage + 1
                                                           : (j + 1) % R::kWeightStages;
        ptx::barrier_wait(weights_full + 8 * next, weight_position.parity());
        decode(first, weight_base + next * R::kWeightStage);
      }
      product(second, rows + offsets[1]);
      release(shared.rows_empty[row_stage]);
      ++row_position.count;
    }
  }
}

// In the epilogue eight lanes share a row; a lane's 16 columns have bits 1, 2, 5 and 6 in the register index
// after the way through shared memory, and bits 0, 3 and 4 in the lane. Columns are swizzled by the row so that
// neither the writes (4 rows x 4 pairs at once) nor the reads (4 rows x 8 lanes) meet in a bank.
__device__ __forceinline__ int epilogue_column(int column, int row) { return column ^ ((row & 3) << 1) ^ ((row & 3) << 3); }

// Columns of lane `sub` once bit 4 is in the register index and bit 6 in the lane: register bits 0-3 are column
// bits 1, 2, 5, 4; lane bits are column bits 0, 3, 6.
__device__ __forceinline__ int owned_column(int sub, int i) {
  return (sub & 1) | (i & 1) << 1 | (i >> 1 & 1) << 2 | (sub >> 1 & 1) << 3 | (i >> 3 & 1) << 4 | (i >> 2 & 1) << 5 |
         (sub >> 2 & 1) << 6;
}

template <int kSize>
__device__ __forceinline__ void read_transformed(float (&values)[kSize], const float* row_values, int row, int sub) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int column = (sub & 1) | (sub >> 1 & 1) << 3 | (sub >> 2 & 1) << 4 | (i & 1) << 1 | (i >> 1 & 1) << 2 |
                 (i >> 2 & 1) << 5 | (i >> 3 & 1) << 6;
    values[i] = row_values[epilogue_column(column, row)];
  }
  butterfly<0>(values), butterfly<1>(values), butterfly<2>(values), butterfly<3>(values);
  exchange<3>(values, 2);  // bit 6 for bit 4
  butterfly<3>(values);
}

__device__ __forceinline__ void load_vector(float (&values)[16], const half* vector) {
  uint4 words[2] = {reinterpret_cast<const uint4*>(vector)[0], reinterpret_cast<const uint4*>(vector)[1]};
  const half2* pairs = reinterpret_cast<const half2*>(words);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[2 * i] = __low2float(pairs[i]);
    values[2 * i + 1] = __high2float(pairs[i]);
  }
}

__device__ __forceinline__ void store_chunk(char* target, const float* values, float scale) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = bits_of(__floats2half2_rn(values[2 * i] * scale, values[2 * i + 1] * scale));
  *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
}

// SwiGLU with the clamp, the input scale of down, and its transform; then the row's share of down's operand.
__device__ __forceinline__ void finish_gate_up(
    float (&gate)[16], float (&up)[16], const half* vectors, int sub, float limit, char* tile_inner, int stored,
    int panel, int row, bool live) {
  float scale[16];
  load_vector(scale, vectors + sub * 16);
#pragma unroll
  for (int i = 0; i < 16; ++i) gate[i] *= kHadamardScale * scale[i];
  load_vector(scale, vectors + kBlock + sub * 16);
#pragma unroll
  for (int i = 0; i < 16; ++i) up[i] *= kHadamardScale * scale[i];
  load_vector(scale, vectors + 2 * kBlock + sub * 16);
  float inner[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float g = fminf(gate[i], limit), u = fminf(fmaxf(up[i], -limit), limit);
    half activated = __float2half_rn(__fdividef(g, 1.0f + __expf(-g)) * u);
    inner[i] = __half2float(__hmul_rn(activated, __float2half_rn(scale[i])));
  }
  // Register bits now: 1, 2, 5, 4; lane: 0, 3, 6. They end as 0, 1, 2, 6 and 3, 4, 5.
  butterfly<0>(inner), butterfly<1>(inner), butterfly<2>(inner), butterfly<3>(inner);
  exchange<2>(inner, 0);  // 1, 2, 0, 4; 5, 3, 6
  butterfly<2>(inner);
  exchange<3>(inner, 1);  // 1, 2, 0, 3; 5, 4, 6
  butterfly<3>(inner);
  exchange<3>(inner, 2);  // 1, 2, 0, 6; 5, 4, 3
  butterfly<3>(inner);
  float ordered[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) ordered[(i >> 2 & 1) | (i & 1) << 1 | (i >> 1 & 1) << 2 | (i & 8)] = inner[i];
  if (!live) return;
  int first = (sub & 1) << 5 | (sub >> 1 & 1) << 4 | (sub >> 2 & 1) << 3;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    int column = panel * kBlock + first + part * 64;
    char* step = tile_inner + int64_t{column / kStep} * stored * kStepBytes;
    store_chunk(step + swizzled(row, column % kStep / 8), ordered + 8 * part, kHadamardScale);
  }
}

// svh and the route weight; then the row's share of the outputs.
__device__ __forceinline__ void finish_down(
    float (&values)[16], const half* svh, int sub, float weight, half* output, bool live) {
  float scale[16];
  load_vector(scale, svh + sub * 16);
#pragma unroll
  for (int i = 0; i < 16; ++i) values[i] *= scale[i] * (kHadamardScale * weight);
  exchange<2>(values, 0);  // 1, 2, 0, 4; 5, 3, 6
  float ordered[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) ordered[(i >> 2 & 1) | (i & 1) << 1 | (i >> 1 & 1) << 2 | (i & 8)] = values[i];
  if (!live) return;
  int first = (sub & 1) << 5 | (sub >> 1 & 1) << 3 | (sub >> 2 & 1) << 6;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    store_chunk(reinterpret_cast<char*>(output + first + part * 16), ordered + 8 * part, 1.0f);
  }
}

template <class D, Pass kPass>
__device__ __forceinline__ void finish(
    float (&sums)[kBlocks][kStreams][2][4], const Arguments& a, const Shape<kPass>& shape, Shared<D, kPass>& shared,
    const Tile& tile, int panel, int parity) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sub = lane % 8;
  const half* vectors = shared.vectors[parity][0];
  const int stored = padded_rows(tile.rows);
#pragma unroll
  for (int part = 0; part < kTileRows / kEpilogueRows; ++part) {
    if (part * kEpilogueRows >= tile.rows) break;
    ptx::sync_threads(1, kComputeThreads);  // the part before has been read
#pragma unroll
    for (int b = 0; b < kEpilogueRows / kRowBlock; ++b) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        auto& sum = sums[part * (kEpilogueRows / kRowBlock) + b][s];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int row = b * kRowBlock + half * 8 + lane / 4;
          float v[4] = {sum[0][2 * half], sum[0][2 * half + 1], sum[1][2 * half], sum[1][2 * half + 1]};
          butterfly<0>(v), butterfly<1>(v);  // column bits 0 and 3
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            int column = warp * kTile + n * 8 + lane % 4 * 2;
            float* target = &shared.epilogue[row][s * kBlock + epilogue_column(column, row)];
            *reinterpret_cast<float2*>(target) = make_float2(v[2 * n], v[2 * n + 1]);
          }
        }
      }
    }
    ptx::sync_threads(1, kComputeThreads);
    const int row = threadIdx.x / 8, in_tile = part * kEpilogueRows + row;
    float first[16], second[16];
    read_transformed(first, shared.epilogue[row], row, sub);
    read_transformed(second, shared.epilogue[row] + kBlock, row, sub);
    bool live = in_tile < tile.rows;
    if constexpr (kPass == Pass::kDown) {
      float weight = live ? a.t.row_weight[tile.row + in_tile] : 0.0f;
      half* outputs = reinterpret_cast<half*>(static_cast<char*>(a.p.workspace) + a.l.outputs);
      half* output = outputs + int64_t{tile.row + in_tile} * a.l.slice + (panel - shape.first_panel) * 2 * kBlock;
      finish_down(first, vectors, sub, weight, output, live);
      if ((panel * 2 + 1) * kBlock < shape.outer) {
        finish_down(second, vectors + kBlock, sub, weight, output + kBlock, live);
      }
    } else {
      char* inner = static_cast<char*>(a.p.workspace) + a.l.inner + int64_t{tile.storage} * a.p.width * 2;
      finish_gate_up(first, second, vectors, sub, a.p.limit, inner, stored, panel, in_tile, live);
    }
  }
}

// Column `thread` of the tile's vectors, in the order in which the lanes of the epilogue own them.
template <class D, Pass kPass>
__device__ __forceinline__ void stage_vectors(
    const Arguments& a, const Shape<kPass>& shape, Shared<D, kPass>& shared, int64_t expert, int panel, int parity) {
  int thread = threadIdx.x % kBlock, which = threadIdx.x / kBlock;
  int sub = thread / 16, column = owned_column(sub, thread % 16);
  auto load = [expert](const void* vector, int64_t stride, int index) {
    return static_cast<const half*>(vector)[expert * stride + index];
  };
  if constexpr (kPass == Pass::kDown) {
    int at = (panel * 2 + which) * kBlock + column;
    if (at < shape.outer) shared.vectors[parity][which][thread] = load(a.p.down.svh, a.p.down.svh_stride, at);
  } else {
    int at = panel * kBlock + column;
    const Projection& w = which ? a.p.up : a.p.gate;
    shared.vectors[parity][which][thread] = load(w.svh, w.svh_stride, at);
    if (which == 0) shared.vectors[parity][2][thread] = load(a.p.down.suh, a.p.down.suh_stride, at);
  }
}

template <class D, Pass kPass>
__global__ void __launch_bounds__(kBlockThreads, 1) experts_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char raw[];
  using R = Rings<D, kPass>;
  auto& shared = *reinterpret_cast<Shared<D, kPass>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Shape<kPass> shape(a);

  if (threadIdx.x == 0) {
    for (int i = 0; i < R::kRowStages; ++i) {
      ptx::barrier_init(ptx::shared_address(&shared.rows_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.rows_empty[i]), kComputeThreads);
    }
    for (int i = 0; i < R::kWeightStages; ++i) {
      ptx::barrier_init(ptx::shared_address(&shared.weights_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.weights_empty[i]), kComputeThreads);
    }
    for (int i = 0; i < kQueue; ++i) {
      ptx::barrier_init(ptx::shared_address(&shared.jobs_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.jobs_empty[i]), kComputeThreads + 32);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();

  if (warp >= kComputeWarps) {
    ptx::give_registers<kCopyRegisters>();
    if (warp == kComputeWarps) feed_weights<D, kPass>(a, shape, shared);
    if (warp == kComputeWarps + 1) feed_rows<D, kPass>(a, shape, shared);
    return;
  }
  ptx::take_registers<kComputeRegisters>();
  const D decoder(lane, a.p.bits_x2, a.p.codebook);
  const int steps = shape.inner / kStep, tile_size = decoder.size();
  Position<R::kRowStages> rows;
  Position<R::kWeightStages> weights;
  for (int number = 0;; ++number) {
    int q = number % kQueue;
    ptx::barrier_wait(ptx::shared_address(&shared.jobs_full[q]), number / kQueue & 1);
    const Job job = shared.jobs[q];
    __syncwarp();
    ptx::barrier_arrive(ptx::shared_address(&shared.jobs_empty[q]));
    if (job.tile < 0) break;
    const Tile tile = a.t.tiles[job.tile];
    stage_vectors<D, kPass>(a, shape, shared, tile.expert, job.panel, number & 1);
    float sums[kBlocks][kStreams][2][4] = {};
    switch (padded_rows(tile.rows) / kRowBlock) {
#define EXL3_CASE(blocks)                                                                      \
  case blocks:                                                                                 \
    multiply<D, kPass, blocks>(sums, decoder, shared, steps, tile_size, rows, weights); \
    break;
      EXL3_CASE(1)
      EXL3_CASE(2)
      EXL3_CASE(3)
      EXL3_CASE(4)
      EXL3_CASE(5)
      EXL3_CASE(6)
      EXL3_CASE(7)
      EXL3_CASE(8)
#undef EXL3_CASE
    }
    finish<D, kPass>(sums, a, shape, shared, tile, job.panel, number & 1);
  }
}

template <class D, Pass kPass>
cudaError_t launch(const Arguments& a, cudaStream_t stream) {
  auto* kernel = experts_kernel<D, kPass>;
  constexpr int kBytes = sizeof(Shared<D, kPass>);
  static_assert(kBytes <= 101376, "a GB10 has no more");
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<a.p.multiprocessors, kBlockThreads, kBytes, stream>>>(a);
  return cudaGetLastError();
}

template <class D>
cudaError_t gate_up(const Problem& p, const Layout& l, const Tables& t, int chunk, cudaStream_t stream) {
  Arguments a{p, l, t, chunk};
  return p.shared_suh ? launch<D, Pass::kGateUp>(a, stream) : launch<D, Pass::kGateUpSeparate>(a, stream);
}

template <class D>
cudaError_t down(const Problem& p, const Layout& l, const Tables& t, int slice, cudaStream_t stream) {
  return launch<D, Pass::kDown>({p, l, t, slice}, stream);
}

#define EXL3_INSTANTIATE(...)                                                                                       \
  template cudaError_t gate_up<__VA_ARGS__>(const Problem&, const Layout&, const Tables&, int, cudaStream_t); \
  template cudaError_t down<__VA_ARGS__>(const Problem&, const Layout&, const Tables&, int, cudaStream_t);

}  // namespace exl3
