// DataCopy and DataCopyPad between global memory and the unified buffer, and within the unified buffer.
#pragma once

#include <cstring>
#include <vector>

#include "queues.h"

namespace AscendC {

// Lengths and gaps in blocks of 32 bytes.
struct DataCopyParams {
    ascendc_model::CopyCount blockCount = 1;
    ascendc_model::Copy16 blockLen = 0;
    ascendc_model::Copy16 srcStride = 0;
    ascendc_model::Copy16 dstStride = 0;
};

// blockLen and the gap on the global side in bytes, the gap on the UB side in blocks of 32 bytes.
struct DataCopyExtParams {
    ascendc_model::CopyCount blockCount = 1;
    ascendc_model::CopyBytes blockLen = 0;
    ascendc_model::CopyStride srcStride = 0;
    ascendc_model::CopyStride dstStride = 0;
    uint32_t rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
    bool isPad = false;
    uint8_t leftPadding = 0;
    uint8_t rightPadding = 0;
    T paddingValue{};
};

}  // namespace AscendC

namespace ascendc_model {

// `count` pieces of `bytes` bytes; consecutive pieces start `gm_step` bytes apart in global memory and `ub_step` in UB.
struct CopyShape {
    uint64_t count;
    uint64_t bytes;
    uint64_t gm_step;
    uint64_t ub_step;

    uint64_t GmSpan() const { return count == 0 ? 0 : (count - 1) * gm_step + bytes; }
    uint64_t UbSpan() const { return count == 0 ? 0 : (count - 1) * ub_step + RoundUp(bytes); }
    static uint64_t RoundUp(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }
};

// A copy engine needs some time per piece and some per byte; only ratios matter.
inline uint64_t CopyCost(const CopyShape& shape)
{ return shape.count * (8 + shape.bytes / 32); }

inline std::vector<Range> Pieces(uint64_t start, uint64_t count, uint64_t bytes, uint64_t step)
{
    std::vector<Range> pieces;
    if (count > 0 && step == bytes) {
        pieces.push_back({start, start + count * bytes});
        return pieces;
    }
    pieces.reserve(count);
    for (uint64_t i = 0; i < count; ++i) { pieces.push_back({start + i * step, start + i * step + bytes}); }
    return pieces;
}

template <typename T>
void CheckCopy(const UbView& ub, const AscendC::GlobalTensor<T>& gm, const CopyShape& shape, const char* role)
{
    ub.CheckAligned(role);
    ub.CheckUse(role, shape.UbSpan());
    const AscendC::TPosition position = ub.buffer->position;
    Require(position == AscendC::TPosition::VECIN || position == AscendC::TPosition::VECOUT, "copy-position", role,
            " is at ", PositionName(position), "; copies to and from global memory take VECIN and VECOUT");
    gm.CheckSpan(shape.GmSpan());
    Require(reinterpret_cast<uintptr_t>(gm.buffer()->data() + gm.begin()) % sizeof(T) == 0, "gm-alignment",
            "the global address is not a multiple of the ", sizeof(T), " bytes of an element");
}

template <typename T>
void CopyIn(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from, const CopyShape& shape)
{
    Core& core = Core::Current();
    CheckCopy(to.view(), from, shape, "the destination");
    const uint32_t ub = to.view().begin;
    core.Execute(Pipe::kMte2, {}, Pieces(ub, shape.count, CopyShape::RoundUp(shape.bytes), shape.ub_step),
                 from.buffer(), Pieces(from.begin(), shape.count, shape.bytes, shape.gm_step), {}, CopyCost(shape));
    for (uint64_t i = 0; i < shape.count; ++i) {
        const uint64_t piece = ub + i * shape.ub_step;
        std::memcpy(core.ub() + piece, from.buffer()->data() + from.begin() + i * shape.gm_step, shape.bytes);
        core.Invalidate({piece + shape.bytes, piece + CopyShape::RoundUp(shape.bytes)});  // dummy filling
    }
}

template <typename T>
void CopyOut(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<T>& from, const CopyShape& shape)
{
    Core& core = Core::Current();
    CheckCopy(from.view(), to, shape, "the source");
    const uint32_t ub = from.view().begin;
    core.Execute(Pipe::kMte3, Pieces(ub, shape.count, shape.bytes, shape.ub_step), {}, to.buffer(), {},
                 Pieces(to.begin(), shape.count, shape.bytes, shape.gm_step), CopyCost(shape));
    for (uint64_t i = 0; i < shape.count; ++i) {
        std::memcpy(to.buffer()->data() + to.begin() + i * shape.gm_step, core.ub() + ub + i * shape.ub_step,
                    shape.bytes);
    }
}

template <typename T>
CopyShape ContiguousCopy(uint32_t elements)
{
    const uint64_t bytes = static_cast<uint64_t>(elements) * sizeof(T);
    Require(bytes % kBlockBytes == 0, "copy-length", "DataCopy of ", elements, " elements is ", bytes,
            " bytes, not a multiple of ", kBlockBytes, "; the rest would be dropped silently, use DataCopyPad");
    return {1, bytes, bytes, bytes};
}

template <typename T>
void CheckPadLength(const AscendC::DataCopyExtParams& params)
{
    Require(params.blockLen % sizeof(T) == 0, "copy-length", "DataCopyPad blockLen of ", +params.blockLen,
            " bytes is not a multiple of the ", sizeof(T), " bytes of an element");
}

}  // namespace ascendc_model

namespace AscendC {

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count)
{
    ascendc_model::Core::Current().BeginInstruction("DataCopy from GM on MTE2");
    ascendc_model::CopyIn(dst, src, ascendc_model::ContiguousCopy<T>(count));
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count)
{
    ascendc_model::Core::Current().BeginInstruction("DataCopy to GM on MTE3");
    ascendc_model::CopyOut(dst, src, ascendc_model::ContiguousCopy<T>(count));
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params)
{
    ascendc_model::Core::Current().BeginInstruction("DataCopy from GM on MTE2");
    const uint64_t bytes = static_cast<uint64_t>(params.blockLen) * ascendc_model::kBlockBytes;
    ascendc_model::CopyIn(dst, src,
                          {params.blockCount, bytes, bytes + params.srcStride * ascendc_model::kBlockBytes,
                           bytes + params.dstStride * ascendc_model::kBlockBytes});
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params)
{
    ascendc_model::Core::Current().BeginInstruction("DataCopy to GM on MTE3");
    const uint64_t bytes = static_cast<uint64_t>(params.blockLen) * ascendc_model::kBlockBytes;
    ascendc_model::CopyOut(dst, src,
                           {params.blockCount, bytes, bytes + params.dstStride * ascendc_model::kBlockBytes,
                            bytes + params.srcStride * ascendc_model::kBlockBytes});
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& pad)
{
    ascendc_model::Core::Current().BeginInstruction("DataCopyPad from GM on MTE2");
    ascendc_model::Require(!pad.isPad && pad.leftPadding == 0 && pad.rightPadding == 0, "not-modelled",
                           "the CPU model supports DataCopyPad without padding values only");
    ascendc_model::CheckPadLength<T>(params);
    const uint64_t bytes = params.blockLen;
    const uint64_t ub_bytes = ascendc_model::CopyShape::RoundUp(bytes);
    ascendc_model::CopyIn(dst, src,
                          {params.blockCount, bytes, bytes + params.srcStride,
                           ub_bytes + static_cast<uint64_t>(params.dstStride) * ascendc_model::kBlockBytes});
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params)
{
    ascendc_model::Core::Current().BeginInstruction("DataCopyPad to GM on MTE3");
    ascendc_model::CheckPadLength<T>(params);
    const uint64_t bytes = params.blockLen;
    const uint64_t ub_bytes = ascendc_model::CopyShape::RoundUp(bytes);
    ascendc_model::CopyOut(dst, src,
                           {params.blockCount, bytes, bytes + params.dstStride,
                            ub_bytes + static_cast<uint64_t>(params.srcStride) * ascendc_model::kBlockBytes});
}

}  // namespace AscendC
