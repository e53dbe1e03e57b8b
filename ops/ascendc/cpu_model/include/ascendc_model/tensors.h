// LocalTensor and GlobalTensor: handles that know their memory, so that every access can be checked.
#pragma once

#include <cstdint>

#include "core.h"
#include "scalar_types.h"

namespace ascendc_model {

// A byte range of one UB buffer as an instruction sees it.
struct UbView {
    UbBuffer* buffer = nullptr;
    uint32_t generation = 0;
    uint32_t begin = 0;

    // The checks every use of a tensor needs: it exists, is not freed, is not in a queue, and has `bytes` bytes.
    void CheckUse(const char* role, uint64_t bytes) const
    {
        Require(buffer != nullptr, "queue-state", role, " is a LocalTensor that was never allocated");
        Require(buffer->generation == generation && buffer->state != UbBuffer::State::kFree, "queue-state", role,
                " is used after its FreeTensor");
        Require(buffer->state != UbBuffer::State::kEnqueued, "queue-state", role,
                " is used between EnQue and DeQue; take it out of the queue first");
        Require(begin <= buffer->end && bytes <= buffer->end - begin, "ub-bounds", role, " spans ", bytes,
                " bytes but its buffer has only ", buffer->end - std::min(begin, buffer->end), " from there");
    }

    void CheckAligned(const char* role) const
    {
        Require(begin % kBlockBytes == 0, "ub-alignment", role, " starts at UB address ", begin,
                "; instructions need a multiple of ", kBlockBytes);
    }
};

}  // namespace ascendc_model

namespace AscendC {

template <typename T>
class LocalTensor {
public:
    using PrimType = T;

    LocalTensor() = default;
    explicit LocalTensor(const ascendc_model::UbView& view) : view_(view) {}

    LocalTensor operator[](uint32_t offset) const
    {
        LocalTensor shifted = *this;
        shifted.view_.begin += offset * static_cast<uint32_t>(sizeof(T));
        return shifted;
    }

    template <typename U>
    LocalTensor<U> ReinterpretCast() const
    { return LocalTensor<U>(view_); }

    uint32_t GetSize() const { return (view_.buffer->end - view_.begin) / static_cast<uint32_t>(sizeof(T)); }
    TPosition GetPosition() const { return view_.buffer->position; }

    // Scalar access happens on pipe S and needs the same synchronisation as any other pipe.
    T GetValue(uint32_t index) const
    {
        ascendc_model::Core& core = ascendc_model::Core::Current();
        core.BeginInstruction("GetValue on pipe S");
        const uint32_t at = Element(index);
        core.Execute(ascendc_model::Pipe::kScalar, {{at, at + sizeof(T)}}, {}, nullptr, {}, {}, 0);
        return *reinterpret_cast<const T*>(core.ub() + at);
    }

    void SetValue(uint32_t index, T value) const
    {
        ascendc_model::Core& core = ascendc_model::Core::Current();
        core.BeginInstruction("SetValue on pipe S");
        const uint32_t at = Element(index);
        core.Execute(ascendc_model::Pipe::kScalar, {}, {{at, at + sizeof(T)}}, nullptr, {}, {}, 0);
        *reinterpret_cast<T*>(core.ub() + at) = value;
    }

    const ascendc_model::UbView& view() const { return view_; }

private:
    uint32_t Element(uint32_t index) const
    {
        const uint32_t at = index * static_cast<uint32_t>(sizeof(T));
        view_.CheckUse("the tensor", static_cast<uint64_t>(at) + sizeof(T));
        return view_.begin + at;
    }

    ascendc_model::UbView view_;
};

template <typename T>
class GlobalTensor {
public:
    using PrimType = T;

    void SetGlobalBuffer(T* address, uint64_t elements)
    {
        SetGlobalBuffer(address);
        elements_ = elements;
    }

    void SetGlobalBuffer(T* address)
    {
        auto* bytes = reinterpret_cast<uint8_t*>(address);
        buffer_ = &ascendc_model::Core::Current().memory().Find(bytes);
        begin_ = static_cast<uint64_t>(bytes - buffer_->data());
        elements_ = (buffer_->bytes() - begin_) / sizeof(T);
    }

    GlobalTensor operator[](uint64_t offset) const
    {
        GlobalTensor shifted = *this;
        shifted.begin_ += offset * sizeof(T);
        shifted.elements_ = offset <= elements_ ? elements_ - offset : 0;
        return shifted;
    }

    T GetValue(uint64_t index) const
    {
        ascendc_model::Core& core = ascendc_model::Core::Current();
        core.BeginInstruction("GetValue of global memory on pipe S");
        const uint64_t at = begin_ + index * sizeof(T);
        CheckSpan(index * sizeof(T) + sizeof(T));
        core.Execute(ascendc_model::Pipe::kScalar, {}, {}, buffer_, {{at, at + sizeof(T)}}, {}, 0);
        return *reinterpret_cast<const T*>(buffer_->data() + at);
    }

    // The `bytes` bytes from the tensor's start must lie in what SetGlobalBuffer named.
    void CheckSpan(uint64_t bytes) const
    {
        ascendc_model::Require(buffer_ != nullptr, "gm-bounds", "a GlobalTensor is used before SetGlobalBuffer");
        ascendc_model::Require(bytes <= elements_ * sizeof(T), "gm-bounds", "spans ", bytes,
                               " bytes of global buffer '", buffer_->name(), "' where the GlobalTensor has only ",
                               elements_ * sizeof(T));
    }

    ascendc_model::GlobalBuffer* buffer() const { return buffer_; }
    uint64_t begin() const { return begin_; }

private:
    ascendc_model::GlobalBuffer* buffer_ = nullptr;
    uint64_t begin_ = 0;
    uint64_t elements_ = 0;
};

}  // namespace AscendC
