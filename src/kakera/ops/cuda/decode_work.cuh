// How decode attention is shared out: all blocks of 64 keys, whichever rows and heads they belong to, lie behind each
// other on one line, measured in cost, and every thread block takes an equal stretch of it. So rows of unequal length
// balance, and a graph's launch is the same for all lengths. -DCODES=1: INT2 pages, a 16-bit sink and window; 0: all
// pages are 16 bit
#pragma once

constexpr int PAGE = 64, MOST_ROWS = 256;
constexpr int HALF_TOKENS = 16,
              PARTS = PAGE / HALF_TOKENS;  // 16-bit keys of a warp's step: costs what a page of codes does

struct Rows {           // sequences; query tokens of row r: offsets[r] .. offsets[r + 1] - 1, at positions starts[r] ..
    const int *starts;  // [rows]
    const int *offsets;                       // [rows + 1]
    const int *slots;                         // [rows]: of the 16-bit sink and window
    const int *tables;                        // [rows, table_stride]: page ids
    int rows, table_stride, kv_heads, group;  // group: query heads of a KV head
    int window, tiles, blocks, pad;           // R; the most query tiles of a row; thread blocks that share the line
};

struct Row {
    int start, count;   // query tokens
    int low, last;      // 16-bit pages low .. last, and page 0 besides if low > 0
    int halves, coded;  // units of cost: parts of 16-bit pages; INT2 pages 1 .. coded
    int tiles;          // of 8 columns: a column is a query token and head
    __device__ __forceinline__ int cost() const { return halves + coded; }  // of one head and tile
};

__device__ __forceinline__ Row row_of(const Rows &rows, int r) {
    Row row;
    row.start = rows.starts[r], row.count = rows.offsets[r + 1] - rows.offsets[r];
    row.last = (row.start + row.count - 1) / PAGE;
    row.low = CODES ? max(0, row.start / PAGE - rows.window) : 0;
    row.halves = row.count > 0 ? (row.last - row.low + 1 + (row.low > 0)) * PARTS : 0;
    row.coded = CODES && row.count > 0 ? max(0, row.last - rows.window - 1) : 0;
    row.tiles = (row.count * rows.group + 7) / 8;
    return row;
}

// before[r]: cost of the rows in front of r; before[rows]: of all. By one warp; the caller synchronises.
__device__ __forceinline__ void sum_costs(const Rows &rows, int *before) {
    int lane = threadIdx.x % 32, sum = 0;
    for (int first = 0; first < rows.rows; first += 32) {
        int cost = 0;
        if (first + lane < rows.rows) {
            Row row = row_of(rows, first + lane);
            cost = row.cost() * row.tiles * rows.kv_heads;
        }
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            int below = __shfl_up_sync(~0u, cost, lanes);
            if (lane >= lanes) cost += below;
        }
        if (first + lane < rows.rows) before[first + lane + 1] = sum + cost;
        sum += __shfl_sync(~0u, cost, 31);
    }
    if (lane == 0) before[0] = 0;
}

__device__ __forceinline__ int stretch_begin(int total, int blocks, int block) {
    return (int)((long long)total * block / blocks);
}

// The last thread block whose stretch begins at `cost` or before.
__device__ __forceinline__ int owner(int total, int blocks, int cost) {
    return (int)(((long long)(cost + 1) * blocks - 1) / total);
}
