// Host side of lse_merge: checks a merge and writes the table that the kernel reads. Plain C++, no device needed.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lse_merge_table.h"

namespace pa_npu {

struct MergeProblem {
    // Token rows [first, last) of the running result, ascending and disjoint; the partial result holds exactly these
    // rows, one interval after the other.
    std::vector<std::pair<int64_t, int64_t>> intervals;
    int64_t tokens = 0;  // of the running result
    int64_t heads = 0;
    int64_t dim = 0;
    ElementType type = ElementType::kFloat;
    // Statistics are [tokens, heads, 8] in memory ("TND") or, per sequence of the call that made them, [heads, length,
    // 8] ("NTD"); then the lengths of those sequences are needed.
    bool ntd = false;
    bool part_ntd = false;
    std::vector<int64_t> segments;
    std::vector<int64_t> part_segments;
    int64_t max_cores = 0;  // vector cores of the device
};

// Work rows and elements of a row that one core handles at once; see README.md for the arithmetic.
struct TileSize {
    uint32_t rows;
    uint32_t cols;
};

TileSize ChooseTile(uint32_t dim, ElementType type, uint64_t rows_per_core);

// Bytes of the unified buffer that the kernel reserves for a tile.
uint64_t TileBytes(const TileSize& tile, ElementType type);

// The table; its kHeaderNumCores word is how many cores to launch, 0 when there is nothing to merge.
// Throws std::invalid_argument naming the value and the rule.
std::vector<uint32_t> MakeTable(const MergeProblem& problem);

}  // namespace pa_npu
