// TPipe, TQue, TQueBind and TBuf: buffers, the life of a queue tensor, and the events that order the pipes.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "tensors.h"

namespace AscendC {

using QuePosition = TPosition;
using TEventID = int32_t;

// Events between two pipes; the name reads "source, then target".
enum class HardEvent : uint32_t {
    S_V = 0 * 4 + 1,
    S_MTE2 = 0 * 4 + 2,
    S_MTE3 = 0 * 4 + 3,
    V_S = 1 * 4 + 0,
    V_MTE2 = 1 * 4 + 2,
    V_MTE3 = 1 * 4 + 3,
    MTE2_S = 2 * 4 + 0,
    MTE2_V = 2 * 4 + 1,
    MTE2_MTE3 = 2 * 4 + 3,
    MTE3_S = 3 * 4 + 0,
    MTE3_V = 3 * 4 + 1,
    MTE3_MTE2 = 3 * 4 + 2,
};

}  // namespace AscendC

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace ascendc_model {

constexpr Pipe SourceOf(AscendC::HardEvent event)
{ return static_cast<Pipe>(static_cast<uint32_t>(event) / kPipes); }
constexpr Pipe TargetOf(AscendC::HardEvent event)
{ return static_cast<Pipe>(static_cast<uint32_t>(event) % kPipes); }

}  // namespace ascendc_model

namespace AscendC {

template <HardEvent event>
void SetFlag(int32_t id)
{
    ascendc_model::Core& core = ascendc_model::Core::Current();
    core.BeginInstruction("SetFlag");
    core.SetFlag(ascendc_model::SourceOf(event), ascendc_model::TargetOf(event), id);
}

template <HardEvent event>
void WaitFlag(int32_t id)
{
    ascendc_model::Core& core = ascendc_model::Core::Current();
    core.BeginInstruction("WaitFlag");
    core.WaitFlag(ascendc_model::SourceOf(event), ascendc_model::TargetOf(event), id);
}

template <pipe_t pipe>
void PipeBarrier()
{
    static_assert(pipe != PIPE_S, "PipeBarrier does not support PIPE_S");
    ascendc_model::Core& core = ascendc_model::Core::Current();
    core.BeginInstruction("PipeBarrier");
    if constexpr (pipe == PIPE_ALL) {
        core.BarrierAll();
    } else {
        core.Barrier(static_cast<ascendc_model::Pipe>(pipe));
    }
}

// `source` is where the data comes from and `target` where it goes; GM stands for the copy engines' side.
template <TPosition source, TPosition target, int32_t depth>
class TQueBind {
    static_assert(depth >= 1, "the model supports queues of depth 1 or more (no in-place tensors)");
    static constexpr ascendc_model::Pipe kProducer =
        source == TPosition::VECOUT ? ascendc_model::Pipe::kVector : ascendc_model::Pipe::kMte2;
    static constexpr ascendc_model::Pipe kConsumer =
        target == TPosition::VECIN ? ascendc_model::Pipe::kVector : ascendc_model::Pipe::kMte3;

public:
    static constexpr TPosition kPosition = source == TPosition::GM ? target : source;

    void Reserve(uint32_t num, uint32_t bytes)
    {
        ascendc_model::Core& core = Begin("InitBuffer");
        uint32_t others = 0;
        for (const auto& buffer : core.buffers()) {
            others += buffer.position == kPosition && buffer.state != ascendc_model::UbBuffer::State::kTemporary;
        }
        ascendc_model::Require(others + num <= ascendc_model::kQueueBuffersPerPosition, "queue-buffers", others + num,
                               " queue buffers at position ", ascendc_model::PositionName(kPosition),
                               "; the event ids suffice for ", ascendc_model::kQueueBuffersPerPosition);
        for (uint32_t i = 0; i < num; ++i) {
            buffers_.push_back(&core.Reserve(bytes, kPosition, ascendc_model::UbBuffer::State::kFree));
        }
    }

    template <typename T>
    LocalTensor<T> AllocTensor()
    {
        ascendc_model::Core& core = Begin("AllocTensor");
        for (size_t tried = 0; tried < buffers_.size(); ++tried) {
            ascendc_model::UbBuffer* buffer = buffers_[next_];
            next_ = (next_ + 1) % buffers_.size();
            if (buffer->state != ascendc_model::UbBuffer::State::kFree) { continue; }
            if (buffer->free_event >= 0) {
                core.WaitFlag(kConsumer, kProducer, buffer->free_event);
                core.ReleaseEvent(kConsumer, kProducer, buffer->free_event);
                buffer->free_event = -1;
            }
            buffer->state = ascendc_model::UbBuffer::State::kAllocated;
            ++buffer->generation;
            core.Poison(*buffer);
            return LocalTensor<T>({buffer, buffer->generation, buffer->begin});
        }
        ascendc_model::Fail("queue-exhausted", "all ", buffers_.size(), " buffers of the ",
                            ascendc_model::PositionName(kPosition), " queue are in use; FreeTensor one of them first");
    }

    template <typename T>
    bool EnQue(const LocalTensor<T>& tensor)
    {
        ascendc_model::Core& core = Begin("EnQue");
        ascendc_model::UbBuffer* buffer =
            Own(tensor, ascendc_model::UbBuffer::State::kAllocated, "EnQue takes a tensor straight from AllocTensor");
        ascendc_model::Require(waiting_.size() < static_cast<size_t>(depth), "queue-depth", "the queue already holds ",
                               waiting_.size(), " tensors and its depth is ", depth);
        buffer->state = ascendc_model::UbBuffer::State::kEnqueued;
        buffer->queue_event = core.AllocEvent(kProducer, kConsumer);
        core.SetFlag(kProducer, kConsumer, buffer->queue_event);
        waiting_.push_back(buffer);
        return true;
    }

    template <typename T>
    LocalTensor<T> DeQue()
    {
        ascendc_model::Core& core = Begin("DeQue");
        ascendc_model::Require(!waiting_.empty(), "queue-empty", "DeQue from an empty ",
                               ascendc_model::PositionName(kPosition), " queue; nothing was enqueued");
        ascendc_model::UbBuffer* buffer = waiting_.front();
        waiting_.pop_front();
        core.WaitFlag(kProducer, kConsumer, buffer->queue_event);
        core.ReleaseEvent(kProducer, kConsumer, buffer->queue_event);
        buffer->queue_event = -1;
        buffer->state = ascendc_model::UbBuffer::State::kDequeued;
        return LocalTensor<T>({buffer, buffer->generation, buffer->begin});
    }

    template <typename T>
    void FreeTensor(LocalTensor<T>& tensor)
    {
        ascendc_model::Core& core = Begin("FreeTensor");
        ascendc_model::UbBuffer* buffer = Own(tensor, ascendc_model::UbBuffer::State::kDequeued,
                                              "FreeTensor takes a tensor that DeQue returned, once");
        buffer->state = ascendc_model::UbBuffer::State::kFree;
        buffer->free_event = core.AllocEvent(kConsumer, kProducer);
        core.SetFlag(kConsumer, kProducer, buffer->free_event);
    }

    // The framework waits for the events of freed buffers when the pipe goes away.
    ~TQueBind()
    {
        ascendc_model::Core* core = ascendc_model::Core::CurrentOrNull();
        for (ascendc_model::UbBuffer* buffer : buffers_) {
            if (core != nullptr && buffer->free_event >= 0) {
                core->DropFlag(kConsumer, kProducer, buffer->free_event);
            }
        }
    }

private:
    static ascendc_model::Core& Begin(const char* what)
    {
        ascendc_model::Core& core = ascendc_model::Core::Current();
        core.BeginInstruction(what);
        return core;
    }

    template <typename T>
    ascendc_model::UbBuffer* Own(const LocalTensor<T>& tensor, ascendc_model::UbBuffer::State expected,
                                 const char* rule) const
    {
        for (ascendc_model::UbBuffer* buffer : buffers_) {
            if (buffer == tensor.view().buffer) {
                ascendc_model::Require(buffer->state == expected && buffer->generation == tensor.view().generation,
                                       "queue-state", rule, "; this one is in another state");
                return buffer;
            }
        }
        ascendc_model::Fail("queue-state", "the tensor belongs to another queue");
    }

    std::vector<ascendc_model::UbBuffer*> buffers_;
    std::deque<ascendc_model::UbBuffer*> waiting_;
    size_t next_ = 0;
};

template <TPosition position>
constexpr TPosition kQueueSource = position == TPosition::VECIN ? TPosition::GM : position;
template <TPosition position>
constexpr TPosition kQueueTarget = position == TPosition::VECIN ? position : TPosition::GM;

template <TPosition position, int32_t depth>
class TQue : public TQueBind<kQueueSource<position>, kQueueTarget<position>, depth> {
    static_assert(position == TPosition::VECIN || position == TPosition::VECOUT,
                  "the model has the queue positions of the vector core, VECIN and VECOUT");
};

template <TPosition position>
class TBuf {
public:
    void Reserve(uint32_t bytes)
    {
        ascendc_model::Core& core = ascendc_model::Core::Current();
        core.BeginInstruction("InitBuffer");
        buffer_ = &core.Reserve(bytes, position, ascendc_model::UbBuffer::State::kTemporary);
    }

    template <typename T>
    LocalTensor<T> Get()
    { return LocalTensor<T>({buffer_, 0, buffer_->begin}); }

    template <typename T>
    LocalTensor<T> Get(uint32_t elements)
    {
        const LocalTensor<T> tensor = Get<T>();
        tensor.view().CheckUse("TBuf::Get", static_cast<uint64_t>(elements) * sizeof(T));
        return tensor;
    }

private:
    ascendc_model::UbBuffer* buffer_ = nullptr;
};

class TPipe {
public:
    TPipe() { current_ = this; }
    ~TPipe() { current_ = nullptr; }
    TPipe(const TPipe&) = delete;
    TPipe& operator=(const TPipe&) = delete;

    static TPipe* Current() { return current_; }

    template <typename Queue>
    bool InitBuffer(Queue& queue, uint32_t num, uint32_t bytes)
    {
        queue.Reserve(num, bytes);
        return true;
    }

    template <TPosition position>
    bool InitBuffer(TBuf<position>& buffer, uint32_t bytes)
    {
        buffer.Reserve(bytes);
        return true;
    }

    template <HardEvent event>
    TEventID AllocEventID()
    {
        return ascendc_model::Core::Current().AllocEvent(ascendc_model::SourceOf(event),
                                                         ascendc_model::TargetOf(event));
    }

    template <HardEvent event>
    void ReleaseEventID(TEventID id)
    { ascendc_model::Core::Current().ReleaseEvent(ascendc_model::SourceOf(event), ascendc_model::TargetOf(event), id); }

    TEventID FetchEventID(HardEvent event)
    {
        return ascendc_model::Core::Current().FetchEvent(ascendc_model::SourceOf(event),
                                                         ascendc_model::TargetOf(event));
    }

    template <HardEvent event>
    TEventID FetchEventID()
    { return FetchEventID(event); }

private:
    static inline thread_local TPipe* current_ = nullptr;
};

inline TPipe* GetTPipePtr()
{ return TPipe::Current(); }

}  // namespace AscendC
