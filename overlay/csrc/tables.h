// What the kernels share: the layout of the workspace, and the tables that `route` builds in it on the device.
//
// Rows are the (token, k) pairs of the experts that this kernel takes, sorted by expert. Tiles are up to 128
// rows of one expert. The rows of a tile are stored as [inner / 32][rows, rounded up to 16][32] fp16, so that
// one step of a tile is one contiguous piece; 16-byte chunks within the 64 bytes of a row are swizzled.
#pragma once

#include "fat_moe.h"
#include "hadamard.h"

namespace exl3 {

constexpr int kTileRows = 128;
constexpr int kRowBlock = 16;
constexpr int kStep = 32;  // of the inner dimension
constexpr int kStepBytes = kStep * 2;
constexpr int kMaxExperts = 512;
constexpr int kMaxChunks = 64;
constexpr int kRouteSlots = 2048;  // that one block of threads sorts

// What two passes over the same memory may take: rows gathered for gate and up, then outputs of down.
constexpr int64_t kScratchBytes = 168ll << 20;

struct Tile {
  int expert;
  int row, rows;     // in the sorted rows
  int storage;       // first stored row: tiles before it take whole blocks of 16
  int first, count;  // the tiles of the same expert
};

struct Header {
  int rows, tiles;
  int chunk_tiles[kMaxChunks + 1];    // tiles of chunk c: [c], [c + 1]
  int tickets[2 * kMaxChunks];        // of gate/up by chunk, then of down by slice
};

struct Tables {
  Header* header;
  Tile* tiles;
  int* block_tile;    // block of 16 stored rows -> tile
  int* row_slot;      // sorted row -> token * top_k + k
  float* row_weight;  // sorted row -> route weight
  int* slot_row;      // token * top_k + k -> sorted row, or -1
  int* starts;        // [blocks of kRouteSlots slots, experts]: rows there, then the first of them or -1
};

struct Layout {
  int rows;             // at most
  int tiles;            // at most
  int storage_rows;     // at most
  int chunk_rows, chunks;  // stored rows gathered at a time
  int slice, slices;       // columns of down's output at a time
  int64_t header, tile_table, block_tile, row_slot, row_weight, slot_row, starts, gathered, inner, outputs, bytes;
};

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

inline Layout layout_of(int tokens, int top_k, int experts, int hidden, int width, bool shared_suh) {
  Layout l{};
  l.rows = tokens * top_k;
  int used = l.rows < experts ? l.rows : experts;
  l.tiles = l.rows / kTileRows + used;
  l.storage_rows = l.rows + (kRowBlock - 1) * used;
  l.storage_rows = ceil_div(l.storage_rows, kRowBlock) * kRowBlock;

  int64_t row_bytes = int64_t{hidden} * 2 * (shared_suh ? 1 : 2);
  int64_t chunk = kScratchBytes / row_bytes - kTileRows;
  int64_t least = ceil_div(l.storage_rows, kMaxChunks - 1);
  chunk = chunk > least ? chunk : least;
  l.chunk_rows = static_cast<int>(chunk < l.storage_rows ? chunk : l.storage_rows);
  l.chunk_rows = ceil_div(l.chunk_rows, kRowBlock) * kRowBlock;
  l.chunks = ceil_div(l.storage_rows, l.chunk_rows);

  // Two halves of 128 columns at a time; the last pair may lack its second half.
  int pairs = ceil_div(hidden, 2 * kBlock);
  int64_t most = kScratchBytes / (int64_t{l.rows} * 2 * 2 * kBlock);
  int per_slice = static_cast<int>(most < 1 ? 1 : most < pairs ? most : pairs);
  l.slices = ceil_div(pairs, per_slice);
  if (l.slices > kMaxChunks) l.slices = kMaxChunks;
  per_slice = ceil_div(pairs, l.slices);
  l.slices = ceil_div(pairs, per_slice);
  l.slice = per_slice * 2 * kBlock;

  int64_t at = 0;
  auto take = [&at](int64_t bytes) {
    int64_t start = at;
    at += (bytes + 255) / 256 * 256;
    return start;
  };
  l.header = take(sizeof(Header));
  l.tile_table = take(int64_t{l.tiles} * sizeof(Tile));
  l.block_tile = take(int64_t{l.storage_rows / kRowBlock} * 4);
  l.row_slot = take(int64_t{l.rows} * 4);
  l.row_weight = take(int64_t{l.rows} * 4);
  l.slot_row = take(int64_t{l.rows} * 4);
  l.starts = take(int64_t{ceil_div(l.rows, kRouteSlots)} * experts * 4);
  l.inner = take(int64_t{l.storage_rows} * width * 2);
  int64_t gathered = int64_t{l.chunk_rows + kTileRows} * row_bytes, outputs = int64_t{l.rows} * l.slice * 2;
  l.gathered = l.outputs = take(gathered > outputs ? gathered : outputs);
  l.bytes = at;
  return l;
}

inline Tables tables_of(const Layout& l, void* workspace) {
  char* base = static_cast<char*>(workspace);
  return {reinterpret_cast<Header*>(base + l.header),
          reinterpret_cast<Tile*>(base + l.tile_table),
          reinterpret_cast<int*>(base + l.block_tile),
          reinterpret_cast<int*>(base + l.row_slot),
          reinterpret_cast<float*>(base + l.row_weight),
          reinterpret_cast<int*>(base + l.slot_row),
          reinterpret_cast<int*>(base + l.starts)};
}

// Byte offset of the 16-byte chunk `chunk` (0..3 within a step) of `row` in a tile's step.
__host__ __device__ inline int swizzled(int row, int chunk) {
  return row * kStepBytes + ((chunk ^ (row >> 1 & 3)) << 4);
}

__host__ __device__ inline int padded_rows(int rows) { return (rows + kRowBlock - 1) / kRowBlock * kRowBlock; }

}  // namespace exl3
