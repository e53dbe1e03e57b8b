// What every vector instruction has in common: which bytes it touches, and the rules about them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "tensors.h"

namespace AscendC {

struct UnaryRepeatParams {
    UnaryRepeatParams() = default;
    UnaryRepeatParams(ascendc_model::StrideBlocks dst_block, ascendc_model::StrideBlocks src_block,
                      ascendc_model::StrideBlocks dst_repeat, ascendc_model::StrideBlocks src_repeat)
        : dstBlkStride(dst_block), srcBlkStride(src_block), dstRepStride(dst_repeat), srcRepStride(src_repeat)
    {
    }

    ascendc_model::StrideBlocks dstBlkStride = 1;
    ascendc_model::StrideBlocks srcBlkStride = 1;
    ascendc_model::StrideBlocks dstRepStride = 8;
    ascendc_model::StrideBlocks srcRepStride = 8;
};

struct BinaryRepeatParams {
    BinaryRepeatParams() = default;
    BinaryRepeatParams(ascendc_model::StrideBlocks dst_block, ascendc_model::StrideBlocks src0_block,
                       ascendc_model::StrideBlocks src1_block, ascendc_model::StrideBlocks dst_repeat,
                       ascendc_model::StrideBlocks src0_repeat, ascendc_model::StrideBlocks src1_repeat)
        : dstBlkStride(dst_block),
          src0BlkStride(src0_block),
          src1BlkStride(src1_block),
          dstRepStride(dst_repeat),
          src0RepStride(src0_repeat),
          src1RepStride(src1_repeat)
    {
    }

    ascendc_model::StrideBlocks dstBlkStride = 1;
    ascendc_model::StrideBlocks src0BlkStride = 1;
    ascendc_model::StrideBlocks src1BlkStride = 1;
    ascendc_model::StrideBlocks dstRepStride = 8;
    ascendc_model::StrideBlocks src0RepStride = 8;
    ascendc_model::StrideBlocks src1RepStride = 8;
};

}  // namespace AscendC

namespace ascendc_model {

// Which elements an instruction computes: either the first `count` in a row, or `repeats` times the lanes of a mask.
struct VectorShape {
    bool contiguous = true;
    uint64_t count = 0;
    uint32_t repeats = 0;
    std::vector<uint32_t> lanes;

    static VectorShape Contiguous(int64_t count)
    {
        Require(count >= 0, "mask-limit", "element count is ", count);
        VectorShape shape;
        shape.count = static_cast<uint64_t>(count);
        return shape;
    }

    static VectorShape Repeated(uint64_t mask, Repeats repeats, uint32_t lanes_per_repeat)
    {
        Require(mask >= 1 && mask <= lanes_per_repeat, "mask-limit", "mask ", mask, " is outside of [1, ",
                lanes_per_repeat, "], the elements of one ", kRepeatBytes, "-byte repeat");
        VectorShape shape;
        shape.contiguous = false;
        shape.repeats = repeats;
        for (uint32_t lane = 0; lane < mask; ++lane) { shape.lanes.push_back(lane); }
        return shape;
    }

    static VectorShape Masked(const uint64_t mask[], Repeats repeats, uint32_t lanes_per_repeat)
    {
        VectorShape shape;
        shape.contiguous = false;
        shape.repeats = repeats;
        for (uint32_t lane = 0; lane < 128; ++lane) {
            if ((mask[lane / 64] >> (lane % 64)) & 1u) {
                Require(lane < lanes_per_repeat, "mask-limit", "mask bit ", lane, " is set but a repeat has only ",
                        lanes_per_repeat, " elements");
                shape.lanes.push_back(lane);
            }
        }
        Require(!shape.lanes.empty(), "mask-limit", "no bit of the mask is set");
        return shape;
    }

    bool Empty() const { return contiguous ? count == 0 : repeats == 0; }
    uint64_t NumRepeats(uint32_t elements_per_repeat) const
    { return contiguous ? (count + elements_per_repeat - 1) / elements_per_repeat : repeats; }
};

// One tensor of a vector instruction and how it walks through the unified buffer.
struct VectorOperand {
    const char* role;
    UbView view;
    uint32_t element_bytes;
    uint32_t block_stride;
    uint32_t repeat_stride;

    uint32_t Address(uint32_t repeat, uint32_t lane) const
    {
        const uint32_t per_block = kBlockBytes / element_bytes;
        return view.begin + (repeat * repeat_stride + lane / per_block * block_stride) * kBlockBytes +
               lane % per_block * element_bytes;
    }

    // The byte ranges touched, joined where they are adjacent.
    std::vector<Range> Ranges(const VectorShape& shape) const
    {
        if (shape.contiguous) { return {{view.begin, view.begin + shape.count * element_bytes}}; }
        std::vector<Range> ranges;
        for (uint32_t repeat = 0; repeat < shape.repeats; ++repeat) {
            for (uint32_t lane : shape.lanes) {
                const uint64_t at = Address(repeat, lane);
                if (!ranges.empty() && ranges.back().end == at) {
                    ranges.back().end += element_bytes;
                } else {
                    ranges.push_back({at, at + element_bytes});
                }
            }
        }
        return ranges;
    }

    bool SameWalk(const VectorOperand& other) const
    {
        return view.begin == other.view.begin && element_bytes == other.element_bytes &&
               block_stride == other.block_stride && repeat_stride == other.repeat_stride;
    }
};

template <typename T>
VectorOperand Operand(const char* role, const AscendC::LocalTensor<T>& tensor, uint32_t block_stride = 1,
                      uint32_t repeat_stride = kBlocksPerRepeat)
{ return {role, tensor.view(), static_cast<uint32_t>(sizeof(T)), block_stride, repeat_stride}; }

inline bool Intersect(std::vector<Range> some, std::vector<Range> others)
{
    const auto by_begin = [](const Range& a, const Range& b) { return a.begin < b.begin; };
    std::sort(some.begin(), some.end(), by_begin);
    std::sort(others.begin(), others.end(), by_begin);
    size_t i = 0;
    size_t j = 0;
    while (i < some.size() && j < others.size()) {
        if (some[i].begin < others[j].end && others[j].begin < some[i].end) { return true; }
        some[i].end < others[j].end ? ++i : ++j;
    }
    return false;
}

// Source and destination either coincide element by element or do not touch: repeats overlap in time.
inline void CheckOverlap(const VectorShape& shape, const VectorOperand& dst, const std::vector<Range>& dst_ranges,
                         const VectorOperand& src, const std::vector<Range>& src_ranges)
{
    if (dst.view.buffer != src.view.buffer || !Intersect(dst_ranges, src_ranges)) { return; }
    Require(dst.SameWalk(src), "overlap", dst.role, " and ", src.role,
            " overlap partly; they must be the same elements or disjoint");
    Require(shape.contiguous || shape.repeats <= 1 || dst.repeat_stride != 0, "overlap", dst.role, " and ", src.role,
            " coincide with repeat stride 0, so a repeat would read what the one before writes");
}

// Checks the rules, records the accesses on pipe V; returns false when there is nothing to compute.
inline bool AccessOperands(const VectorShape& shape, const VectorOperand& dst,
                           std::initializer_list<VectorOperand> sources)
{
    Core& core = Core::Current();
    if (shape.Empty()) { return false; }
    std::vector<Range> reads;
    const std::vector<Range> writes = dst.Ranges(shape);
    const auto check = [](const VectorOperand& operand, const std::vector<Range>& ranges) {
        uint64_t end = operand.view.begin;
        for (const Range& range : ranges) { end = std::max(end, range.end); }
        operand.view.CheckAligned(operand.role);
        operand.view.CheckUse(operand.role, end - operand.view.begin);
    };
    check(dst, writes);
    const uint32_t per_block = kBlockBytes / dst.element_bytes;
    Require(shape.contiguous || dst.block_stride != 0 || shape.lanes.back() < per_block, "stride-limit",
            "dstBlkStride 0 makes the blocks of one repeat overwrite each other");
    uint32_t widest = dst.element_bytes;
    for (const VectorOperand& source : sources) {
        const std::vector<Range> ranges = source.Ranges(shape);
        check(source, ranges);
        CheckOverlap(shape, dst, writes, source, ranges);
        reads.insert(reads.end(), ranges.begin(), ranges.end());
        widest = std::max(widest, source.element_bytes);
    }
    const uint64_t repeats = shape.NumRepeats(kRepeatBytes / widest);
    core.counters().vector_repeats += repeats;
    core.Execute(Pipe::kVector, reads, writes, nullptr, {}, {}, 4 + repeats);
    return true;
}

// Calls compute(destination address, source addresses) for every element.
template <size_t NumSources, typename Compute>
void ForEachElement(const VectorShape& shape, const VectorOperand& dst,
                    const std::array<VectorOperand, NumSources>& sources, Compute compute)
{
    std::array<uint8_t*, NumSources> from{};
    uint8_t* ub = Core::Current().ub();
    if (shape.contiguous) {
        for (uint64_t i = 0; i < shape.count; ++i) {
            for (size_t s = 0; s < NumSources; ++s) {
                from[s] = ub + sources[s].view.begin + i * sources[s].element_bytes;
            }
            compute(ub + dst.view.begin + i * dst.element_bytes, from);
        }
        return;
    }
    for (uint32_t repeat = 0; repeat < shape.repeats; ++repeat) {
        for (uint32_t lane : shape.lanes) {
            for (size_t s = 0; s < NumSources; ++s) { from[s] = ub + sources[s].Address(repeat, lane); }
            compute(ub + dst.Address(repeat, lane), from);
        }
    }
}

template <typename T>
T Load(const uint8_t* address)
{
    T value;
    std::memcpy(&value, address, sizeof(T));
    return value;
}

template <typename T>
void Store(uint8_t* address, T value)
{ std::memcpy(address, &value, sizeof(T)); }

// The first step of every vector instruction that is defined for a few types.
template <typename T, typename... Allowed>
void BeginTyped(const char* name)
{
    Core::Current().BeginInstruction(name);
    Require((std::is_same_v<T, Allowed> || ...), "data-type", "it does not take ", TypeName<T>(),
            " on this core; Cast to float first");
}

}  // namespace ascendc_model
