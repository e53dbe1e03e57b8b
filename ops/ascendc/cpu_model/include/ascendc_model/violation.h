// Violations of the rules of the vector core: each names its rule, the core, the instruction, and what to do.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace ascendc_model {

// Facts of one vector core of Ascend 910B, from the public Ascend C documentation.
constexpr uint32_t kUbBytes = 192 * 1024;
constexpr uint32_t kBlockBytes = 32;    // unit of UB addresses and strides
constexpr uint32_t kRepeatBytes = 256;  // processed by one repeat of a vector instruction
constexpr uint32_t kBlocksPerRepeat = kRepeatBytes / kBlockBytes;
constexpr uint32_t kMaxRepeats = 255;
constexpr uint32_t kMaxStrideBlocks = 255;
constexpr uint32_t kMaxCopyBlocks = 4095;         // DataCopyPad blockCount
constexpr uint32_t kMaxCopyBlockBytes = 2097151;  // DataCopyPad blockLen, 21 bits
constexpr uint32_t kEventIds = 8;                 // per pair of pipes
constexpr uint32_t kQueueBuffersPerPosition = 8;
constexpr uint32_t kBuffersPerKernel = 64;

class Violation : public std::runtime_error {
public:
    explicit Violation(const std::string& message) : std::runtime_error(message) {}
};

// Where the simulated program is; filled in by the running core.
std::string DescribePlace();

template <typename... Parts>
[[noreturn]] void Fail(const char* rule, const Parts&... parts)
{
    std::ostringstream text;
    text << "[" << rule << "] " << DescribePlace() << ": ";
    (text << ... << parts);
    throw Violation(text.str());
}

template <typename... Parts>
void Require(bool holds, const char* rule, const Parts&... parts)
{
    if (!holds) { Fail(rule, parts...); }
}

// An integer parameter of the API. The real API takes uint8_t or uint16_t and truncates silently; this one refuses.
struct RepeatRule {
    static constexpr const char* kName = "repeat-limit";
    static constexpr const char* kWhat = "repeat times of the next instruction";
};
struct StrideRule {
    static constexpr const char* kName = "stride-limit";
    static constexpr const char* kWhat = "a stride of the next instruction, in 32-byte blocks,";
};
struct CopyRule {
    static constexpr const char* kName = "copy-limits";
    static constexpr const char* kWhat = "a parameter of the next data copy";
};

template <uint64_t Maximum, typename Rule>
class Bounded {
public:
    constexpr Bounded() = default;

    template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
    Bounded(Integer value)
    {
        if (value < Integer{0} || static_cast<uint64_t>(value) > Maximum) {
            Fail(Rule::kName, Rule::kWhat, " must lie in [0, ", Maximum, "], is ", +value);
        }
        value_ = static_cast<uint32_t>(value);
    }

    operator uint32_t() const { return value_; }

private:
    uint32_t value_ = 0;
};

using Repeats = Bounded<kMaxRepeats, RepeatRule>;
using StrideBlocks = Bounded<kMaxStrideBlocks, StrideRule>;
using Copy16 = Bounded<65535, CopyRule>;
using CopyCount = Bounded<kMaxCopyBlocks, CopyRule>;
using CopyBytes = Bounded<kMaxCopyBlockBytes, CopyRule>;
using CopyStride = Bounded<4294967295u, CopyRule>;

}  // namespace ascendc_model
