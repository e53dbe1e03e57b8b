// half and bfloat16_t as the host sees them, and rounding of fp32 values to their grids.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace AscendC {

enum class RoundMode {
    CAST_NONE = 0,
    CAST_RINT,
    CAST_FLOOR,
    CAST_CEIL,
    CAST_ROUND,
    CAST_TRUNC,
    CAST_ODD,
};

}  // namespace AscendC

namespace ascendc_model {

inline uint32_t BitsOf(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline float FloatOf(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline double RoundToInteger(double value, AscendC::RoundMode mode)
{
    switch (mode) {
        case AscendC::RoundMode::CAST_FLOOR:
            return std::floor(value);
        case AscendC::RoundMode::CAST_CEIL:
            return std::ceil(value);
        case AscendC::RoundMode::CAST_ROUND:
            return std::round(value);
        case AscendC::RoundMode::CAST_TRUNC:
            return std::trunc(value);
        case AscendC::RoundMode::CAST_ODD: {
            const double down = std::trunc(value);
            const bool exact = down == value;
            const bool odd = std::fmod(down, 2.0) != 0.0;
            return exact || odd ? down : down + std::copysign(1.0, value);
        }
        default:
            return std::nearbyint(value);
    }
}

// The nearest value with `fraction_bits` fraction bits, by `mode`; `lowest_exponent` is that of the smallest normal.
inline float RoundToGrid(float value, AscendC::RoundMode mode, int fraction_bits, int lowest_exponent)
{
    if (!std::isfinite(value) || value == 0.0f) { return value; }
    const int exponent = std::max(static_cast<int>((BitsOf(value) >> 23) & 0xff) - 127, lowest_exponent);
    const double quantum = std::ldexp(1.0, exponent - fraction_bits);
    return static_cast<float>(RoundToInteger(value / quantum, mode) * quantum);
}

}  // namespace ascendc_model

// The device compiler has both types built in, at global scope.
struct half {
    uint16_t bits = 0;

    half() = default;
    half(float value) { *this = Rounded(value, AscendC::RoundMode::CAST_RINT); }

    // Values beyond 65504 become infinite, as in IEEE 754.
    static half Rounded(float value, AscendC::RoundMode mode)
    {
        const float rounded = ascendc_model::RoundToGrid(value, mode, 10, -14);
        const uint32_t from = ascendc_model::BitsOf(rounded);
        const uint32_t sign = (from >> 16) & 0x8000u;
        const float magnitude = std::fabs(rounded);
        half result;
        if (std::isnan(rounded)) {
            result.bits = static_cast<uint16_t>(sign | 0x7e00u);
        } else if (magnitude > 65504.0f) {
            result.bits = static_cast<uint16_t>(sign | 0x7c00u);
        } else if (magnitude < 6.103515625e-05f) {
            result.bits = static_cast<uint16_t>(sign | static_cast<uint32_t>(magnitude * 16777216.0f));
        } else {
            result.bits = static_cast<uint16_t>(sign | (((from >> 13) & 0x3ffffu) - (112u << 10)));
        }
        return result;
    }

    operator float() const
    {
        const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
        const uint32_t exponent = (bits >> 10) & 0x1fu;
        const uint32_t fraction = bits & 0x3ffu;
        if (exponent == 0) {
            const float magnitude = static_cast<float>(fraction) / 16777216.0f;
            return sign ? -magnitude : magnitude;
        }
        if (exponent == 31) { return ascendc_model::FloatOf(sign | 0x7f800000u | (fraction << 13)); }
        return ascendc_model::FloatOf(sign | ((exponent + 112u) << 23) | (fraction << 13));
    }
};

struct bfloat16_t {
    uint16_t bits = 0;

    bfloat16_t() = default;
    bfloat16_t(float value) { *this = Rounded(value, AscendC::RoundMode::CAST_RINT); }

    static bfloat16_t Rounded(float value, AscendC::RoundMode mode)
    {
        bfloat16_t result;
        if (std::isnan(value)) {
            result.bits = 0x7fc0;
        } else {
            result.bits =
                static_cast<uint16_t>(ascendc_model::BitsOf(ascendc_model::RoundToGrid(value, mode, 7, -126)) >> 16);
        }
        return result;
    }

    operator float() const { return ascendc_model::FloatOf(static_cast<uint32_t>(bits) << 16); }
};

namespace ascendc_model {

template <typename T>
constexpr bool kIsSmallFloat = std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>;

template <typename T>
constexpr const char* TypeName()
{
    if constexpr (std::is_same_v<T, float>) {
        return "float";
    } else if constexpr (std::is_same_v<T, half>) {
        return "half";
    } else if constexpr (std::is_same_v<T, bfloat16_t>) {
        return "bfloat16_t";
    } else if constexpr (std::is_same_v<T, int16_t>) {
        return "int16_t";
    } else if constexpr (std::is_same_v<T, uint16_t>) {
        return "uint16_t";
    } else if constexpr (std::is_same_v<T, int32_t>) {
        return "int32_t";
    } else if constexpr (std::is_same_v<T, uint32_t>) {
        return "uint32_t";
    } else if constexpr (std::is_same_v<T, int8_t>) {
        return "int8_t";
    } else if constexpr (std::is_same_v<T, uint8_t>) {
        return "uint8_t";
    } else {
        return "another type";
    }
}

}  // namespace ascendc_model
