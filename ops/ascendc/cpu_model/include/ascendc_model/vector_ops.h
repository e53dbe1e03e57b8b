// The vector instructions of the model: two-operand, scalar-operand, one-operand, Duplicate and Cast.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "vector_call.h"

namespace ascendc_model {

template <typename T>
constexpr uint32_t kLanes = kRepeatBytes / sizeof(T);

// The three ways to say which elements: a count, a number of leading lanes, a bit mask.
template <typename T>
VectorShape LeadingLanes(uint64_t mask, Repeats repeats)
{ return VectorShape::Repeated(mask, repeats, kLanes<T>); }
template <typename T>
VectorShape MaskedLanes(const uint64_t mask[], Repeats repeats)
{ return VectorShape::Masked(mask, repeats, kLanes<T>); }

template <typename T, typename Function>
void RunBinary(const VectorShape& shape, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src0,
               const AscendC::LocalTensor<T>& src1, const AscendC::BinaryRepeatParams& p, Function function)
{
    const VectorOperand to = Operand("dst", dst, p.dstBlkStride, p.dstRepStride);
    const VectorOperand a = Operand("src0", src0, p.src0BlkStride, p.src0RepStride);
    const VectorOperand b = Operand("src1", src1, p.src1BlkStride, p.src1RepStride);
    if (!AccessOperands(shape, to, {a, b})) { return; }
    ForEachElement<2>(shape, to, {a, b}, [&](uint8_t* out, const std::array<uint8_t*, 2>& in) {
        Store<T>(out, static_cast<T>(function(Load<T>(in[0]), Load<T>(in[1]))));
    });
}

template <typename T, typename Function>
void RunUnary(const VectorShape& shape, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
              const AscendC::UnaryRepeatParams& p, Function function)
{
    const VectorOperand to = Operand("dst", dst, p.dstBlkStride, p.dstRepStride);
    const VectorOperand from = Operand("src", src, p.srcBlkStride, p.srcRepStride);
    if (!AccessOperands(shape, to, {from})) { return; }
    ForEachElement<1>(shape, to, {from}, [&](uint8_t* out, const std::array<uint8_t*, 1>& in) {
        Store<T>(out, static_cast<T>(function(Load<T>(in[0]))));
    });
}

// dst is an operand as well.
template <typename T, typename U>
void RunMulAddDst(const VectorShape& shape, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>& src0,
                  const AscendC::LocalTensor<U>& src1, const AscendC::BinaryRepeatParams& p)
{
    BeginTyped<T, half, float>("MulAddDst on V");
    Require(std::is_same_v<T, U>, "data-type", "the CPU model supports MulAddDst with one type only");
    const VectorOperand to = Operand("dst", dst, p.dstBlkStride, p.dstRepStride);
    const VectorOperand a = Operand("src0", src0, p.src0BlkStride, p.src0RepStride);
    const VectorOperand b = Operand("src1", src1, p.src1BlkStride, p.src1RepStride);
    if (!AccessOperands(shape, to, {to, a, b})) { return; }
    ForEachElement<2>(shape, to, {a, b}, [&](uint8_t* out, const std::array<uint8_t*, 2>& in) {
        const float product = static_cast<float>(Load<U>(in[0])) * static_cast<float>(Load<U>(in[1]));
        Store<T>(out, static_cast<T>(static_cast<float>(Load<T>(out)) + product));
    });
}

struct AddFunction {
    template <typename T>
    auto operator()(T a, T b) const
    { return a + b; }
};
struct SubFunction {
    template <typename T>
    auto operator()(T a, T b) const
    { return a - b; }
};
struct MulFunction {
    template <typename T>
    auto operator()(T a, T b) const
    { return a * b; }
};
struct DivFunction {
    template <typename T>
    auto operator()(T a, T b) const
    { return a / b; }
};
struct MaxFunction {
    template <typename T>
    auto operator()(T a, T b) const
    { return a > b ? a : b; }
};
struct MinFunction {
    template <typename T>
    auto operator()(T a, T b) const
    { return a < b ? a : b; }
};

// The rounding modes that Cast accepts for a pair of types, as bits of RoundMode.
constexpr uint32_t Modes(std::initializer_list<AscendC::RoundMode> modes)
{
    uint32_t bits = 0;
    for (AscendC::RoundMode mode : modes) { bits |= 1u << static_cast<uint32_t>(mode); }
    return bits;
}

constexpr uint32_t kNoRounding = Modes({AscendC::RoundMode::CAST_NONE});
constexpr uint32_t kAnyRounding =
    Modes({AscendC::RoundMode::CAST_RINT, AscendC::RoundMode::CAST_FLOOR, AscendC::RoundMode::CAST_CEIL,
           AscendC::RoundMode::CAST_ROUND, AscendC::RoundMode::CAST_TRUNC});

template <typename To, typename From>
constexpr uint32_t CastModes()
{
    if constexpr (std::is_same_v<From, half> && std::is_same_v<To, float>) {
        return kNoRounding;
    } else if constexpr (std::is_same_v<From, bfloat16_t> && std::is_same_v<To, float>) {
        return kNoRounding;
    } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, bfloat16_t>) {
        return kAnyRounding;
    } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, half>) {
        return kAnyRounding | kNoRounding | Modes({AscendC::RoundMode::CAST_ODD});
    } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, int32_t>) {
        return kAnyRounding;
    } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, float>) {
        return kAnyRounding;
    } else if constexpr (std::is_same_v<From, int32_t> && std::is_same_v<To, float>) {
        return kAnyRounding | kNoRounding;
    } else {
        return 0;
    }
}

template <typename To, typename From>
To CastElement(From value, AscendC::RoundMode mode)
{
    const float number = static_cast<float>(value);
    if constexpr (kIsSmallFloat<To>) {
        return To::Rounded(number, mode);
    } else if constexpr (std::is_same_v<To, int32_t>) {
        const double rounded = RoundToInteger(number, mode);
        return static_cast<int32_t>(std::min(std::max(rounded, -2147483648.0), 2147483647.0));
    } else if constexpr (std::is_same_v<From, To>) {
        return static_cast<To>(RoundToInteger(number, mode));
    } else {
        return static_cast<To>(number);
    }
}

template <typename To, typename From>
void RunCast(const VectorShape& shape, const AscendC::LocalTensor<To>& dst, const AscendC::LocalTensor<From>& src,
             AscendC::RoundMode mode, const AscendC::UnaryRepeatParams& p)
{
    Core::Current().BeginInstruction("Cast on V");
    constexpr uint32_t modes = CastModes<To, From>();
    Require(modes != 0, "cast-type", "there is no Cast from ", TypeName<From>(), " to ", TypeName<To>());
    constexpr const char* names[] = {"CAST_NONE",  "CAST_RINT",  "CAST_FLOOR", "CAST_CEIL",
                                     "CAST_ROUND", "CAST_TRUNC", "CAST_ODD"};
    Require((modes >> static_cast<uint32_t>(mode)) & 1u, "cast-round", "Cast from ", TypeName<From>(), " to ",
            TypeName<To>(), " does not take ", names[static_cast<uint32_t>(mode)],
            modes == kNoRounding ? "; it loses nothing, use CAST_NONE" : "; name a rounding such as CAST_RINT");
    const VectorOperand to = Operand("dst", dst, p.dstBlkStride, p.dstRepStride);
    const VectorOperand from = Operand("src", src, p.srcBlkStride, p.srcRepStride);
    if (!AccessOperands(shape, to, {from})) { return; }
    ForEachElement<1>(shape, to, {from}, [&](uint8_t* out, const std::array<uint8_t*, 1>& in) {
        Store<To>(out, CastElement<To>(Load<From>(in[0]), mode));
    });
}

template <typename To, typename From>
constexpr uint32_t kCastLanes = kRepeatBytes / std::max(sizeof(To), sizeof(From));

}  // namespace ascendc_model

namespace AscendC {

#define ASCENDC_MODEL_BINARY(NAME, FUNCTION, ...)                                                                      \
    template <typename T>                                                                                              \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count)        \
    {                                                                                                                  \
        ascendc_model::BeginTyped<T, __VA_ARGS__>(#NAME " on V");                                                      \
        ascendc_model::RunBinary(ascendc_model::VectorShape::Contiguous(count), dst, src0, src1, BinaryRepeatParams(), \
                                 ascendc_model::FUNCTION());                                                           \
    }                                                                                                                  \
    template <typename T>                                                                                              \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,        \
              ascendc_model::Repeats repeats, const BinaryRepeatParams& params)                                        \
    {                                                                                                                  \
        ascendc_model::BeginTyped<T, __VA_ARGS__>(#NAME " on V");                                                      \
        ascendc_model::RunBinary(ascendc_model::LeadingLanes<T>(mask, repeats), dst, src0, src1, params,               \
                                 ascendc_model::FUNCTION());                                                           \
    }                                                                                                                  \
    template <typename T>                                                                                              \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,                       \
              const uint64_t mask[], ascendc_model::Repeats repeats, const BinaryRepeatParams& params)                 \
    {                                                                                                                  \
        ascendc_model::BeginTyped<T, __VA_ARGS__>(#NAME " on V");                                                      \
        ascendc_model::RunBinary(ascendc_model::MaskedLanes<T>(mask, repeats), dst, src0, src1, params,                \
                                 ascendc_model::FUNCTION());                                                           \
    }

ASCENDC_MODEL_BINARY(Add, AddFunction, half, float, int16_t, int32_t)
ASCENDC_MODEL_BINARY(Sub, SubFunction, half, float, int16_t, int32_t)
ASCENDC_MODEL_BINARY(Mul, MulFunction, half, float, int16_t, int32_t)
ASCENDC_MODEL_BINARY(Max, MaxFunction, half, float, int16_t, int32_t)
ASCENDC_MODEL_BINARY(Min, MinFunction, half, float, int16_t, int32_t)
ASCENDC_MODEL_BINARY(Div, DivFunction, half, float)
#undef ASCENDC_MODEL_BINARY

template <typename T, typename U>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, int32_t count)
{ ascendc_model::RunMulAddDst(ascendc_model::VectorShape::Contiguous(count), dst, src0, src1, BinaryRepeatParams()); }

template <typename T, typename U>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, uint64_t mask,
               ascendc_model::Repeats repeats, const BinaryRepeatParams& params)
{ ascendc_model::RunMulAddDst(ascendc_model::LeadingLanes<T>(mask, repeats), dst, src0, src1, params); }

#define ASCENDC_MODEL_SCALAR(NAME, FUNCTION)                                                                  \
    template <typename T, typename U>                                                                         \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const U& scalar, int32_t count)           \
    {                                                                                                         \
        ascendc_model::BeginTyped<T, half, float, int16_t, int32_t>(#NAME " on V");                           \
        ascendc_model::RunUnary(ascendc_model::VectorShape::Contiguous(count), dst, src, UnaryRepeatParams(), \
                                [&](T x) { return ascendc_model::FUNCTION()(x, static_cast<T>(scalar)); });   \
    }                                                                                                         \
    template <typename T, typename U>                                                                         \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const U& scalar, uint64_t mask,           \
              ascendc_model::Repeats repeats, const UnaryRepeatParams& params)                                \
    {                                                                                                         \
        ascendc_model::BeginTyped<T, half, float, int16_t, int32_t>(#NAME " on V");                           \
        ascendc_model::RunUnary(ascendc_model::LeadingLanes<T>(mask, repeats), dst, src, params,              \
                                [&](T x) { return ascendc_model::FUNCTION()(x, static_cast<T>(scalar)); });   \
    }

ASCENDC_MODEL_SCALAR(Adds, AddFunction)
ASCENDC_MODEL_SCALAR(Muls, MulFunction)
ASCENDC_MODEL_SCALAR(Maxs, MaxFunction)
ASCENDC_MODEL_SCALAR(Mins, MinFunction)
#undef ASCENDC_MODEL_SCALAR

#define ASCENDC_MODEL_UNARY(NAME, EXPRESSION)                                                                      \
    template <typename T>                                                                                          \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t count)                                 \
    {                                                                                                              \
        ascendc_model::BeginTyped<T, half, float>(#NAME " on V");                                                  \
        ascendc_model::RunUnary(ascendc_model::VectorShape::Contiguous(count), dst, src, UnaryRepeatParams(),      \
                                [](float x) { return EXPRESSION; });                                               \
    }                                                                                                              \
    template <typename T>                                                                                          \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, ascendc_model::Repeats repeats, \
              const UnaryRepeatParams& params)                                                                     \
    {                                                                                                              \
        ascendc_model::BeginTyped<T, half, float>(#NAME " on V");                                                  \
        ascendc_model::RunUnary(ascendc_model::LeadingLanes<T>(mask, repeats), dst, src, params,                   \
                                [](float x) { return EXPRESSION; });                                               \
    }

ASCENDC_MODEL_UNARY(Exp, std::exp(x))
ASCENDC_MODEL_UNARY(Ln, std::log(x))
ASCENDC_MODEL_UNARY(Abs, std::fabs(x))
ASCENDC_MODEL_UNARY(Sqrt, std::sqrt(x))
ASCENDC_MODEL_UNARY(Reciprocal, 1.0f / x)
#undef ASCENDC_MODEL_UNARY

template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& scalar, int32_t count)
{
    ascendc_model::BeginTyped<T, half, bfloat16_t, float, int16_t, uint16_t, int32_t, uint32_t>("Duplicate on V");
    const ascendc_model::VectorShape shape = ascendc_model::VectorShape::Contiguous(count);
    const ascendc_model::VectorOperand to = ascendc_model::Operand("dst", dst);
    if (ascendc_model::AccessOperands(shape, to, {})) {
        ascendc_model::ForEachElement<0>(
            shape, to, {}, [&](uint8_t* out, const std::array<uint8_t*, 0>&) { ascendc_model::Store<T>(out, scalar); });
    }
}

template <typename To, typename From>
void Cast(const LocalTensor<To>& dst, const LocalTensor<From>& src, const RoundMode& mode, uint32_t count)
{ ascendc_model::RunCast(ascendc_model::VectorShape::Contiguous(count), dst, src, mode, UnaryRepeatParams()); }

template <typename To, typename From>
void Cast(const LocalTensor<To>& dst, const LocalTensor<From>& src, const RoundMode& mode, uint64_t mask,
          ascendc_model::Repeats repeats, const UnaryRepeatParams& params)
{
    ascendc_model::RunCast(ascendc_model::VectorShape::Repeated(mask, repeats, ascendc_model::kCastLanes<To, From>),
                           dst, src, mode, params);
}

}  // namespace AscendC
