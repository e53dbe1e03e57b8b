// The table that the host writes and every core reads: what to merge, how memory walks, and which core does what.
//
// It is an array of uint32_t words in device memory: a header, one entry per core, one entry per piece. A piece is a
// rectangle of work rows: `outer` times `inner` of them. A work row is one token of one head: one vector of `dim`
// elements in both outputs, and one 32-byte block in each of the four statistics arrays. All positions and strides are
// counted in work rows, so the same numbers serve the outputs and the statistics.
#pragma once

#include <cstdint>

namespace pa_npu {

constexpr uint32_t kTableVersion = 1;

enum class ElementType : uint32_t { kFloat = 0, kHalf = 1, kBfloat16 = 2 };

constexpr uint32_t kStatWidth = 8;                           // equal fp32 copies of each statistic
constexpr uint32_t kStatBytes = kStatWidth * sizeof(float);  // one 32-byte block

// Header words.
constexpr uint32_t kHeaderVersion = 0;
constexpr uint32_t kHeaderElementType = 1;
constexpr uint32_t kHeaderDim = 2;
constexpr uint32_t kHeaderTileRows = 3;  // most work rows handled at once
constexpr uint32_t kHeaderTileCols = 4;  // most elements of a row handled at once
constexpr uint32_t kHeaderNumCores = 5;
constexpr uint32_t kHeaderNumPieces = 6;
constexpr uint32_t kHeaderOutRows = 7;   // work rows of the running result; the host checks them before a launch
constexpr uint32_t kHeaderPartRows = 8;  // work rows of the partial result
constexpr uint32_t kHeaderWords = 16;

// Words of a core's entry.
constexpr uint32_t kCorePiece = 0;  // first piece it works on
constexpr uint32_t kCoreSkip = 1;   // work rows of that piece that belong to the core before
constexpr uint32_t kCoreRows = 2;   // its work rows
constexpr uint32_t kCoreWords = 4;

// Words of a piece's entry. Work row (o, i) of a piece lies at base + o * outer stride + i * inner stride.
constexpr uint32_t kPieceInner = 0;
constexpr uint32_t kPieceOuter = 1;
constexpr uint32_t kPieceOutBase = 2;      // in the running output
constexpr uint32_t kPiecePartBase = 3;     // in the partial output
constexpr uint32_t kPieceInnerStride = 4;  // of both outputs
constexpr uint32_t kPieceOuterStride = 5;
constexpr uint32_t kPieceStatBase = 6;  // in the running statistics
constexpr uint32_t kPieceStatInner = 7;
constexpr uint32_t kPieceStatOuter = 8;
constexpr uint32_t kPiecePartStatBase = 9;  // in the partial statistics
constexpr uint32_t kPiecePartStatInner = 10;
constexpr uint32_t kPiecePartStatOuter = 11;
constexpr uint32_t kPieceWords = 16;  // padded to one 64-byte cache line

}  // namespace pa_npu
