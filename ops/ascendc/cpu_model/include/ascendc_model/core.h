// One simulated vector core: its unified buffer, the clocks of its pipes, its event flags, and what it counts.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "global_memory.h"

namespace AscendC {

enum class TPosition : uint8_t { GM, VECIN, VECCALC, VECOUT };

}  // namespace AscendC

namespace ascendc_model {

inline const char* PositionName(AscendC::TPosition position)
{
    constexpr const char* names[] = {"GM", "VECIN", "VECCALC", "VECOUT"};
    return names[static_cast<uint8_t>(position)];
}

// A stretch of the unified buffer handed out by InitBuffer, and its place in the life of a queue tensor.
struct UbBuffer {
    enum class State { kFree, kAllocated, kEnqueued, kDequeued, kTemporary };

    uint32_t begin = 0;
    uint32_t end = 0;
    AscendC::TPosition position = AscendC::TPosition::VECCALC;
    State state = State::kFree;
    uint32_t generation = 0;   // grows with every AllocTensor, so that handles kept after FreeTensor are found
    int32_t free_event = -1;   // event that the next AllocTensor waits for
    int32_t queue_event = -1;  // event that DeQue waits for
};

struct Counters {
    uint64_t instructions = 0;
    uint64_t gm_read_bytes = 0;
    uint64_t gm_written_bytes = 0;
    uint64_t vector_repeats = 0;
    uint64_t ub_bytes = 0;      // most unified buffer any core reserved
    uint64_t busiest_pipe = 0;  // largest cost of all instructions of one pipe of one core
    uint64_t makespan = 0;      // longest core under the cost model, pipes overlapping as the flags allow
};

class Core {
public:
    Core(GlobalMemory& memory, uint32_t index, uint32_t count, uint32_t start_time)
        : memory_(memory),
          index_(index),
          count_(count),
          ub_(kUbBytes),
          valid_(kUbBytes, 0),
          ub_races_("the unified buffer", kUbBytes),
          time_(start_time)
    {
        for (auto& clock : known_) { clock.fill(start_time); }
        issued_.fill(start_time);
    }

    static Core& Current()
    {
        if (current_ == nullptr) {
            throw Violation("[launch] no kernel is running: call the kernel through ascendc_model::Launch");
        }
        return *current_;
    }
    static Core* CurrentOrNull() { return current_; }
    static void SetCurrent(Core* core) { current_ = core; }

    uint32_t index() const { return index_; }
    uint32_t count() const { return count_; }
    uint32_t time() const { return time_; }
    uint8_t* ub() { return ub_.data(); }
    GlobalMemory& memory() { return memory_; }
    Counters& counters() { return counters_; }

    std::string Place() const
    {
        std::string place = "core " + std::to_string(index_);
        return instruction_ == nullptr ? place
                                       : place + ", instruction " + std::to_string(time_) + " (" + instruction_ + ")";
    }

    // --- Unified buffer ---------------------------------------------------------------------------------------------

    UbBuffer& Reserve(uint32_t bytes, AscendC::TPosition position, UbBuffer::State state)
    {
        const uint32_t rounded = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
        Require(bytes > 0, "ub-capacity", "InitBuffer of 0 bytes");
        Require(rounded <= kUbBytes - ub_used_, "ub-capacity", "InitBuffer of ", rounded, " bytes with ", ub_used_,
                " already reserved exceeds the ", kUbBytes, " bytes of the unified buffer; use a smaller tile");
        Require(buffers_.size() < kBuffersPerKernel, "buffer-count", "more than ", kBuffersPerKernel,
                " buffers in one kernel");
        buffers_.emplace_back();
        UbBuffer& buffer = buffers_.back();
        buffer.begin = ub_used_;
        buffer.end = ub_used_ + rounded;
        buffer.position = position;
        buffer.state = state;
        ub_used_ += rounded;
        counters_.ub_bytes = std::max<uint64_t>(counters_.ub_bytes, ub_used_);
        Poison(buffer);
        return buffer;
    }

    // Fresh memory holds NaN in every float type, and reading it before it is written is a violation.
    void Poison(const UbBuffer& buffer)
    {
        std::fill(ub_.begin() + buffer.begin, ub_.begin() + buffer.end, 0xff);
        std::fill(valid_.begin() + buffer.begin, valid_.begin() + buffer.end, 0);
    }

    void Invalidate(const Range& range) { std::fill(valid_.begin() + range.begin, valid_.begin() + range.end, 0); }

    std::deque<UbBuffer>& buffers() { return buffers_; }

    // --- Instructions -----------------------------------------------------------------------------------------------

    void BeginInstruction(const char* name)
    {
        instruction_ = name;
        ++time_;
        ++counters_.instructions;
    }

    // Makes an instruction happen on `pipe`: checks that all its reads and writes are ordered after earlier accesses
    // and that it reads nothing unwritten, then records them. `cost` is in arbitrary units, see AddCost.
    void Execute(Pipe pipe, const std::vector<Range>& ub_reads, const std::vector<Range>& ub_writes, GlobalBuffer* gm,
                 const std::vector<Range>& gm_reads, const std::vector<Range>& gm_writes, uint64_t cost)
    {
        const VectorClock& clock = known_[static_cast<uint32_t>(pipe)];
        for (const Range& range : ub_reads) {
            CheckValid(range);
            ub_races_.CheckRead(range, clock);
        }
        for (const Range& range : ub_writes) { ub_races_.CheckWrite(range, clock); }
        for (const Range& range : gm_reads) {
            gm->CheckRead(range, index_, clock);
            counters_.gm_read_bytes += range.end - range.begin;
        }
        for (const Range& range : gm_writes) {
            gm->CheckWrite(range, index_, clock);
            counters_.gm_written_bytes += range.end - range.begin;
        }
        const Epoch now(pipe, time_);
        for (const Range& range : ub_reads) { ub_races_.RecordRead(range, now); }
        for (const Range& range : ub_writes) {
            ub_races_.RecordWrite(range, now);
            std::fill(valid_.begin() + range.begin, valid_.begin() + range.end, 1);
        }
        for (const Range& range : gm_reads) { gm->RecordRead(range, index_, now); }
        for (const Range& range : gm_writes) { gm->RecordWrite(range, index_, now); }
        issued_[static_cast<uint32_t>(pipe)] = time_;
        if (pipe == Pipe::kScalar) {
            known_[0][0] = time_;  // the scalar pipe orders its own instructions
        }
        AddCost(pipe, cost);
    }

    // --- Synchronisation --------------------------------------------------------------------------------------------

    // Everything that pipe `from` was given so far has finished when the flag is seen.
    void SetFlag(Pipe from, Pipe to, int32_t id)
    {
        Flag& flag = FlagOf(from, to, id, "SetFlag");
        Require(!flag.set, "flag-pairing", "SetFlag of ", EventName(from, to, id),
                " twice with no WaitFlag in between; the second is lost");
        const uint32_t source = static_cast<uint32_t>(from);
        flag.set = true;
        flag.clock = known_[source];
        flag.clock[source] = issued_[source];
        flag.finish = finish_[source];
    }

    void WaitFlag(Pipe from, Pipe to, int32_t id)
    {
        Flag& flag = FlagOf(from, to, id, "WaitFlag");
        Require(flag.set, "flag-pairing", "WaitFlag of ", EventName(from, to, id),
                " that no SetFlag precedes; the pipe would wait for ever");
        flag.set = false;
        const uint32_t target = static_cast<uint32_t>(to);
        for (uint32_t pipe = 0; pipe < kPipes; ++pipe) {
            known_[target][pipe] = std::max(known_[target][pipe], flag.clock[pipe]);
        }
        finish_[target] = std::max(finish_[target], flag.finish);
    }

    void Barrier(Pipe pipe)
    {
        const uint32_t at = static_cast<uint32_t>(pipe);
        known_[at][at] = issued_[at];
    }

    void BarrierAll()
    {
        const uint64_t latest = *std::max_element(finish_.begin(), finish_.end());
        for (auto& clock : known_) { clock = issued_; }
        finish_.fill(latest);
    }

    int32_t AllocEvent(Pipe from, Pipe to)
    {
        auto& taken = events_taken_[PairOf(from, to)];
        for (uint32_t id = 0; id < kEventIds; ++id) {
            if (!taken[id]) {
                taken[id] = true;
                return static_cast<int32_t>(id);
            }
        }
        Fail("event-exhausted", "all ", kEventIds, " event ids from ", PipeName(from), " to ", PipeName(to),
             " are in use; release them or use fewer queue buffers");
    }

    void ReleaseEvent(Pipe from, Pipe to, int32_t id)
    {
        FlagOf(from, to, id, "ReleaseEventID");
        events_taken_[PairOf(from, to)][static_cast<uint32_t>(id)] = false;
    }

    int32_t FetchEvent(Pipe from, Pipe to)
    {
        const int32_t id = AllocEvent(from, to);
        ReleaseEvent(from, to, id);
        return id;
    }

    // A queue keeps one event per freed buffer for the AllocTensor that may follow; those do not count as unbalanced.
    void DropFlag(Pipe from, Pipe to, int32_t id) { flags_[PairOf(from, to)][static_cast<uint32_t>(id)].set = false; }

    // --- End of the kernel ------------------------------------------------------------------------------------------

    void Finish()
    {
        instruction_ = "end of kernel";
        for (const UbBuffer& buffer : buffers_) {
            const char* what = buffer.state == UbBuffer::State::kAllocated  ? "allocated and never enqueued"
                               : buffer.state == UbBuffer::State::kEnqueued ? "enqueued and never dequeued"
                               : buffer.state == UbBuffer::State::kDequeued ? "dequeued and never freed"
                                                                            : nullptr;
            Require(what == nullptr, "queue-leak", "a ", PositionName(buffer.position), " tensor was ", what);
        }
        for (uint32_t from = 0; from < kPipes; ++from) {
            for (uint32_t to = 0; to < kPipes; ++to) {
                for (uint32_t id = 0; id < kEventIds; ++id) {
                    Require(!flags_[from * kPipes + to][id].set, "flag-leak",
                            EventName(static_cast<Pipe>(from), static_cast<Pipe>(to), static_cast<int32_t>(id)),
                            " was set and never waited for; it would release the next kernel's wait");
                }
            }
        }
        counters_.busiest_pipe = *std::max_element(busy_.begin(), busy_.end());
        counters_.makespan = *std::max_element(finish_.begin(), finish_.end());
    }

private:
    struct Flag {
        bool set = false;
        VectorClock clock{};
        uint64_t finish = 0;
    };

    static uint32_t PairOf(Pipe from, Pipe to)
    { return static_cast<uint32_t>(from) * kPipes + static_cast<uint32_t>(to); }

    static std::string EventName(Pipe from, Pipe to, int32_t id)
    { return std::string(PipeName(from)) + "_" + PipeName(to) + " event " + std::to_string(id); }

    Flag& FlagOf(Pipe from, Pipe to, int32_t id, const char* what)
    {
        Require(id >= 0 && id < static_cast<int32_t>(kEventIds), "event-id", what, " with event id ", id,
                "; ids go from 0 to ", kEventIds - 1);
        return flags_[PairOf(from, to)][static_cast<uint32_t>(id)];
    }

    void CheckValid(const Range& range) const
    {
        for (uint64_t at = range.begin; at < range.end; ++at) {
            Require(valid_[at] != 0, "poison", "reads byte ", at,
                    " of the unified buffer, which nothing has written since it was handed out");
        }
    }

    // A pipe starts an instruction when it is done with the one before and with every flag it waited for.
    void AddCost(Pipe pipe, uint64_t cost)
    {
        finish_[static_cast<uint32_t>(pipe)] += cost;
        busy_[static_cast<uint32_t>(pipe)] += cost;
    }

    static inline thread_local Core* current_ = nullptr;

    GlobalMemory& memory_;
    uint32_t index_;
    uint32_t count_;
    std::vector<uint8_t> ub_;
    std::vector<uint8_t> valid_;
    RaceShadow ub_races_;
    uint32_t ub_used_ = 0;
    std::deque<UbBuffer> buffers_;
    uint32_t time_;
    const char* instruction_ = nullptr;
    VectorClock issued_{};
    std::array<VectorClock, kPipes> known_{};
    std::array<std::array<Flag, kEventIds>, kPipes * kPipes> flags_{};
    std::array<std::array<bool, kEventIds>, kPipes * kPipes> events_taken_{};
    std::array<uint64_t, kPipes> finish_{};  // when each pipe is done with what it was given
    std::array<uint64_t, kPipes> busy_{};
    Counters counters_;
};

inline std::string DescribePlace()
{
    const Core* core = Core::CurrentOrNull();
    return core == nullptr ? std::string("host") : core->Place();
}

}  // namespace ascendc_model
