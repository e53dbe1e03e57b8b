// lse_merge: merges a partial attention result into rows of the running one, in place. Vector cores only.
//
// For every work row (a token of a head), with running (o, m, s) and partial (p, n, t) of the same query over disjoint
// keys, where m, n are the maxima of the scaled scores and s, t the sums of exp(score - maximum):
//
//     M = max(m, n)    a = s * exp(m - M)    b = t * exp(n - M)    S = a + b
//     o <- o * a/S + p * b/S        m <- M        s <- S
//
// A side without keys has maximum -inf and sum 0; clamping the maxima to -FLT_MAX and the divisor to FLT_MIN gives it
// the weight 0 instead of NaN. Arithmetic is fp32 whatever the type of o and p.
//
// The statistics hold eight equal copies per work row, exactly one 32-byte block. That block multiplies a whole row
// without a broadcast: block stride 0 reads it for every block of the row, repeat stride 1 moves to the next row.
#include "kernel_operator.h"
#include "lse_merge_table.h"

namespace pa_npu {

using namespace AscendC;

constexpr int32_t kQueueDepth = 1;   // one tensor in flight between stages
constexpr uint32_t kNumBuffers = 2;  // double buffering: copies of one tile run beside the arithmetic of another
constexpr uint32_t kLanes = 64;      // fp32 elements of one 256-byte repeat
constexpr uint32_t kBlockLanes = 8;  // fp32 elements of one 32-byte block
constexpr float kLowest = -3.402823466e+38f;
constexpr float kSmallest = 1.175494351e-38f;

// `count` work rows, `stride` apart, from row `first`.
struct RowSet {
    uint64_t first;
    uint32_t stride;
    uint32_t count;
};

struct Piece {
    uint32_t inner, outer;
    uint32_t outBase, partBase, innerStride, outerStride;
    uint32_t statBase, statInner, statOuter;
    uint32_t partStatBase, partStatInner, partStatOuter;
};

template <typename T>
class LseMerge {
    static constexpr bool kNeedsCast = sizeof(T) != sizeof(float);

public:
    __aicore__ inline void Init(GM_ADDR out, GM_ADDR runningMax, GM_ADDR runningSum, GM_ADDR partOut, GM_ADDR partMax,
                                GM_ADDR partSum, const GlobalTensor<uint32_t>& table, TPipe* pipe)
    {
        table_ = table;
        dim_ = table.GetValue(kHeaderDim);
        tileRows_ = table.GetValue(kHeaderTileRows);
        tileCols_ = table.GetValue(kHeaderTileCols);
        const uint32_t core = kHeaderWords + static_cast<uint32_t>(GetBlockIdx()) * kCoreWords;
        piece_ = table.GetValue(core + kCorePiece);
        skip_ = table.GetValue(core + kCoreSkip);
        rows_ = table.GetValue(core + kCoreRows);
        firstPieceWord_ = kHeaderWords + table.GetValue(kHeaderNumCores) * kCoreWords;

        out_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(out));
        partOut_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(partOut));
        max_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(runningMax));
        sum_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(runningSum));
        partMax_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(partMax));
        partSum_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(partSum));

        // Tensors that travel together share a buffer: the event ids suffice for eight buffers per position.
        const uint32_t cells = tileRows_ * tileCols_;
        const uint32_t stats = tileRows_ * kStatBytes;
        pipe->InitBuffer(statsIn_, kNumBuffers, 4 * stats);
        pipe->InitBuffer(statsOut_, kNumBuffers, 2 * stats);
        pipe->InitBuffer(rowsIn_, kNumBuffers, 2 * cells * static_cast<uint32_t>(sizeof(T)));
        pipe->InitBuffer(rowsOut_, kNumBuffers, cells * static_cast<uint32_t>(sizeof(T)));
        pipe->InitBuffer(weights_, 2 * stats);
        if constexpr (kNeedsCast) { pipe->InitBuffer(wide_, 2 * cells * static_cast<uint32_t>(sizeof(float))); }
    }

    __aicore__ inline void Process()
    {
        for (uint32_t left = rows_, piece = piece_, skip = skip_; left > 0; ++piece, skip = 0) {
            const Piece p = ReadPiece(piece);
            const uint32_t rest = p.inner * p.outer - skip;
            const uint32_t take = rest < left ? rest : left;
            MergePiece(p, skip, take);
            left -= take;
        }
    }

private:
    __aicore__ inline Piece ReadPiece(uint32_t index) const
    {
        const uint32_t word = firstPieceWord_ + index * kPieceWords;
        Piece p;
        p.inner = table_.GetValue(word + kPieceInner);
        p.outer = table_.GetValue(word + kPieceOuter);
        p.outBase = table_.GetValue(word + kPieceOutBase);
        p.partBase = table_.GetValue(word + kPiecePartBase);
        p.innerStride = table_.GetValue(word + kPieceInnerStride);
        p.outerStride = table_.GetValue(word + kPieceOuterStride);
        p.statBase = table_.GetValue(word + kPieceStatBase);
        p.statInner = table_.GetValue(word + kPieceStatInner);
        p.statOuter = table_.GetValue(word + kPieceStatOuter);
        p.partStatBase = table_.GetValue(word + kPiecePartStatBase);
        p.partStatInner = table_.GetValue(word + kPiecePartStatInner);
        p.partStatOuter = table_.GetValue(word + kPiecePartStatOuter);
        return p;
    }

    // Work rows [skip, skip + take) of a piece, tile by tile; a tile never crosses the end of an inner run.
    __aicore__ inline void MergePiece(const Piece& p, uint32_t skip, uint32_t take)
    {
        uint32_t o = skip / p.inner;
        uint32_t i = skip % p.inner;
        while (take > 0) {
            uint32_t count = p.inner - i;
            count = count < take ? count : take;
            count = count < tileRows_ ? count : tileRows_;
            MergeTile(p, o, i, count);
            take -= count;
            i += count;
            if (i == p.inner) {
                i = 0;
                ++o;
            }
        }
    }

    __aicore__ inline void MergeTile(const Piece& p, uint32_t o, uint32_t i, uint32_t count)
    {
        const RowSet rows = At(p.outBase, o, p.outerStride, i, p.innerStride, count);
        const RowSet partRows = At(p.partBase, o, p.outerStride, i, p.innerStride, count);
        const RowSet stats = At(p.statBase, o, p.statOuter, i, p.statInner, count);
        const RowSet partStats = At(p.partStatBase, o, p.partStatOuter, i, p.partStatInner, count);

        StatsIn(stats, partStats);
        MergeStats(count);
        StatsOut(stats);
        for (uint32_t column = 0; column < dim_; column += tileCols_) {
            const uint32_t width = dim_ - column < tileCols_ ? dim_ - column : tileCols_;
            RowsIn(rows, partRows, column, width);
            MergeRows(count, width);
            RowsOut(rows, column, width);
        }
    }

    static __aicore__ inline RowSet At(uint32_t base, uint32_t o, uint32_t outerStride, uint32_t i,
                                       uint32_t innerStride, uint32_t count)
    {
        const uint64_t first = base + static_cast<uint64_t>(o) * outerStride + static_cast<uint64_t>(i) * innerStride;
        return RowSet{first, innerStride, count};
    }

    __aicore__ inline void StatsIn(const RowSet& stats, const RowSet& partStats)
    {
        const uint32_t size = stats.count * kStatWidth;
        LocalTensor<float> in = statsIn_.template AllocTensor<float>();
        CopyIn(in, max_, stats, kStatWidth, 0, kStatWidth);
        CopyIn(in[size], partMax_, partStats, kStatWidth, 0, kStatWidth);
        CopyIn(in[2 * size], sum_, stats, kStatWidth, 0, kStatWidth);
        CopyIn(in[3 * size], partSum_, partStats, kStatWidth, 0, kStatWidth);
        statsIn_.EnQue(in);
    }

    // Merged statistics to statsOut_, and the two weights of every work row to weights_.
    __aicore__ inline void MergeStats(uint32_t count)
    {
        const int32_t size = static_cast<int32_t>(count * kStatWidth);
        LocalTensor<float> in = statsIn_.template DeQue<float>();
        LocalTensor<float> result = statsOut_.template AllocTensor<float>();
        LocalTensor<float> weights = weights_.template Get<float>();
        LocalTensor<float> maxA = in;
        LocalTensor<float> maxB = in[size];
        LocalTensor<float> sumA = in[2 * size];
        LocalTensor<float> sumB = in[3 * size];
        LocalTensor<float> maxM = result;
        LocalTensor<float> sumM = result[size];

        Maxs(maxA, maxA, kLowest, size);
        Maxs(maxB, maxB, kLowest, size);
        PipeBarrier<PIPE_V>();
        Max(maxM, maxA, maxB, size);
        PipeBarrier<PIPE_V>();
        Sub(maxA, maxA, maxM, size);
        Sub(maxB, maxB, maxM, size);
        PipeBarrier<PIPE_V>();
        Exp(maxA, maxA, size);
        Exp(maxB, maxB, size);
        PipeBarrier<PIPE_V>();
        Mul(sumA, sumA, maxA, size);
        Mul(sumB, sumB, maxB, size);
        PipeBarrier<PIPE_V>();
        Add(sumM, sumA, sumB, size);
        PipeBarrier<PIPE_V>();
        Maxs(maxA, sumM, kSmallest, size);  // the divisor
        PipeBarrier<PIPE_V>();
        Div(weights, sumA, maxA, size);
        Div(weights[size], sumB, maxA, size);

        statsOut_.EnQue(result);
        statsIn_.FreeTensor(in);
    }

    __aicore__ inline void StatsOut(const RowSet& stats)
    {
        LocalTensor<float> result = statsOut_.template DeQue<float>();
        CopyOut(max_, result, stats, kStatWidth, 0, kStatWidth);
        CopyOut(sum_, result[stats.count * kStatWidth], stats, kStatWidth, 0, kStatWidth);
        statsOut_.FreeTensor(result);
    }

    __aicore__ inline void RowsIn(const RowSet& rows, const RowSet& partRows, uint32_t column, uint32_t width)
    {
        LocalTensor<T> in = rowsIn_.template AllocTensor<T>();
        CopyIn(in, out_, rows, dim_, column, width);
        CopyIn(in[rows.count * width], partOut_, partRows, dim_, column, width);
        rowsIn_.EnQue(in);
    }

    __aicore__ inline void MergeRows(uint32_t count, uint32_t width)
    {
        const uint32_t cells = count * width;
        LocalTensor<float> weights = weights_.template Get<float>();
        LocalTensor<T> in = rowsIn_.template DeQue<T>();
        LocalTensor<T> result = rowsOut_.template AllocTensor<T>();
        if constexpr (kNeedsCast) {
            LocalTensor<float> wide = wide_.template Get<float>();
            PipeBarrier<PIPE_V>();  // the tile before has read `wide`
            Cast(wide, in, RoundMode::CAST_NONE, 2 * cells);
            PipeBarrier<PIPE_V>();
            WeightedSum(wide, wide, wide[cells], weights, count, width);
            PipeBarrier<PIPE_V>();
            Cast(result, wide, RoundMode::CAST_RINT, cells);
        } else {
            PipeBarrier<PIPE_V>();  // MergeStats has written `weights`
            WeightedSum(result, in, in[cells], weights, count, width);
        }
        rowsOut_.EnQue(result);
        rowsIn_.FreeTensor(in);
    }

    // y = a * weight A + b * weight B, row by row; y may be a.
    __aicore__ inline void WeightedSum(const LocalTensor<float>& y, const LocalTensor<float>& a,
                                       const LocalTensor<float>& b, const LocalTensor<float>& weights, uint32_t count,
                                       uint32_t width)
    {
        const uint8_t rowStride = static_cast<uint8_t>(width / kBlockLanes);
        const uint8_t repeats = static_cast<uint8_t>(count);
        const BinaryRepeatParams params(1, 1, 0, rowStride, rowStride, 1);
        for (uint32_t lane = 0; lane < width; lane += kLanes) {
            const uint64_t mask = width - lane < kLanes ? width - lane : kLanes;
            Mul(y[lane], a[lane], weights, mask, repeats, params);
        }
        PipeBarrier<PIPE_V>();
        for (uint32_t lane = 0; lane < width; lane += kLanes) {
            const uint64_t mask = width - lane < kLanes ? width - lane : kLanes;
            MulAddDst(y[lane], b[lane], weights[count * kStatWidth], mask, repeats, params);
        }
    }

    __aicore__ inline void RowsOut(const RowSet& rows, uint32_t column, uint32_t width)
    {
        LocalTensor<T> result = rowsOut_.template DeQue<T>();
        CopyOut(out_, result, rows, dim_, column, width);
        rowsOut_.FreeTensor(result);
    }

    // Elements [column, column + width) of rows of `rowWidth` elements; packed in the unified buffer.
    template <typename U>
    static __aicore__ inline void CopyIn(const LocalTensor<U>& to, const GlobalTensor<U>& from, const RowSet& rows,
                                         uint32_t rowWidth, uint32_t column, uint32_t width)
    {
        DataCopyPadExtParams<U> noPadding;
        DataCopyPad(to, from[rows.first * rowWidth + column], Blocks<U>(rows, rowWidth, width, true), noPadding);
    }

    template <typename U>
    static __aicore__ inline void CopyOut(const GlobalTensor<U>& to, const LocalTensor<U>& from, const RowSet& rows,
                                          uint32_t rowWidth, uint32_t column, uint32_t width)
    { DataCopyPad(to[rows.first * rowWidth + column], from, Blocks<U>(rows, rowWidth, width, false)); }

    // One large block where the rows are contiguous, else one block per row. The gap is on the global side, in bytes.
    template <typename U>
    static __aicore__ inline DataCopyExtParams Blocks(const RowSet& rows, uint32_t rowWidth, uint32_t width,
                                                      bool globalIsSource)
    {
        constexpr uint32_t kBytes = sizeof(U);
        if (rows.stride == 1 && width == rowWidth) {
            return DataCopyExtParams{1, rows.count * width * kBytes, 0, 0, 0};
        }
        const uint32_t gap = (rows.stride * rowWidth - width) * kBytes;
        const uint16_t count = static_cast<uint16_t>(rows.count);
        return globalIsSource ? DataCopyExtParams{count, width * kBytes, gap, 0, 0}
                              : DataCopyExtParams{count, width * kBytes, 0, gap, 0};
    }

    TQue<TPosition::VECIN, kQueueDepth> statsIn_, rowsIn_;
    TQue<TPosition::VECOUT, kQueueDepth> statsOut_, rowsOut_;
    TBuf<TPosition::VECCALC> weights_, wide_;
    GlobalTensor<uint32_t> table_;
    GlobalTensor<T> out_, partOut_;
    GlobalTensor<float> max_, sum_, partMax_, partSum_;
    uint32_t dim_ = 0;
    uint32_t tileRows_ = 0;
    uint32_t tileCols_ = 0;
    uint32_t firstPieceWord_ = 0;
    uint32_t piece_ = 0;
    uint32_t skip_ = 0;
    uint32_t rows_ = 0;
};

template <typename T>
__aicore__ inline void RunLseMerge(GM_ADDR out, GM_ADDR runningMax, GM_ADDR runningSum, GM_ADDR partOut,
                                   GM_ADDR partMax, GM_ADDR partSum, const GlobalTensor<uint32_t>& table)
{
    TPipe pipe;
    LseMerge<T> merge;
    merge.Init(out, runningMax, runningSum, partOut, partMax, partSum, table, &pipe);
    merge.Process();
}

}  // namespace pa_npu

// One kernel for all types, so that the host needs no choice; the table says which.
extern "C" __global__ __aicore__ void pa_npu_lse_merge(GM_ADDR out, GM_ADDR runningMax, GM_ADDR runningSum,
                                                       GM_ADDR partOut, GM_ADDR partMax, GM_ADDR partSum, GM_ADDR table)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::GlobalTensor<uint32_t> words;
    words.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(table));
    const uint32_t type = words.GetValue(pa_npu::kHeaderElementType);
    if (type == static_cast<uint32_t>(pa_npu::ElementType::kBfloat16)) {
        pa_npu::RunLseMerge<bfloat16_t>(out, runningMax, runningSum, partOut, partMax, partSum, words);
    } else if (type == static_cast<uint32_t>(pa_npu::ElementType::kHalf)) {
        pa_npu::RunLseMerge<half>(out, runningMax, runningSum, partOut, partMax, partSum, words);
    } else {
        pa_npu::RunLseMerge<float>(out, runningMax, runningSum, partOut, partMax, partSum, words);
    }
}

#ifndef ASCENDC_CPU_DEBUG
namespace pa_npu {

void LaunchLseMerge(uint32_t numCores, void* stream, uint8_t* out, uint8_t* runningMax, uint8_t* runningSum,
                    uint8_t* partOut, uint8_t* partMax, uint8_t* partSum, uint8_t* table)
{ pa_npu_lse_merge<<<numCores, nullptr, stream>>>(out, runningMax, runningSum, partOut, partMax, partSum, table); }

}  // namespace pa_npu
#endif
