// Per-byte shadow memory: who touched a byte last, so that unordered accesses are found as races.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "violation.h"

namespace ascendc_model {

enum class Pipe : uint32_t { kScalar = 0, kVector = 1, kMte2 = 2, kMte3 = 3 };
constexpr uint32_t kPipes = 4;

inline const char* PipeName(Pipe pipe)
{
    constexpr const char* names[kPipes] = {"S", "V", "MTE2", "MTE3"};
    return names[static_cast<uint32_t>(pipe)];
}

// completed[p] = time of the latest instruction of pipe p known to have finished.
using VectorClock = std::array<uint32_t, kPipes>;

// When and on which pipe an access happened, in one word; 0 = never. Times grow over the whole launch, so epochs of
// earlier cores are older than any clock of the present one and never look like races.
class Epoch {
public:
    Epoch() = default;
    Epoch(Pipe pipe, uint32_t time) : word_((static_cast<uint32_t>(pipe) << 30) | time) {}

    Pipe pipe() const { return static_cast<Pipe>(word_ >> 30); }
    uint32_t time() const { return word_ & 0x3fffffffu; }
    bool never() const { return word_ == 0; }
    bool FinishedBefore(const VectorClock& clock) const { return clock[word_ >> 30] >= time(); }

private:
    uint32_t word_ = 0;
};

struct Range {
    uint64_t begin;
    uint64_t end;
};

// Races of one memory. An access is ordered after an earlier one when the clock of its pipe covers that one.
class RaceShadow {
public:
    RaceShadow(std::string memory, uint64_t bytes) : memory_(std::move(memory)), written_(bytes)
    {
        for (auto& epochs : read_) { epochs.resize(bytes); }
    }

    void CheckRead(const Range& range, const VectorClock& clock) const
    {
        for (uint64_t at = range.begin; at < range.end; ++at) {
            CheckOrdered(written_[at], clock, at, "read", "written");
        }
    }

    void CheckWrite(const Range& range, const VectorClock& clock) const
    {
        for (uint64_t at = range.begin; at < range.end; ++at) {
            CheckOrdered(written_[at], clock, at, "write", "written");
            for (const auto& epochs : read_) { CheckOrdered(epochs[at], clock, at, "write", "read"); }
        }
    }

    void RecordRead(const Range& range, Epoch now)
    {
        auto& epochs = read_[static_cast<uint32_t>(now.pipe())];
        std::fill(epochs.begin() + range.begin, epochs.begin() + range.end, now);
    }

    void RecordWrite(const Range& range, Epoch now)
    { std::fill(written_.begin() + range.begin, written_.begin() + range.end, now); }

private:
    void CheckOrdered(Epoch earlier, const VectorClock& clock, uint64_t at, const char* now, const char* then) const
    {
        if (!earlier.never() && !earlier.FinishedBefore(clock)) {
            Fail("race", "would ", now, " byte ", at, " of ", memory_, " that pipe ", PipeName(earlier.pipe()), " has ",
                 then, " in instruction ", earlier.time(),
                 " with nothing in between that makes this pipe wait (EnQue/DeQue, SetFlag/WaitFlag or PipeBarrier)");
        }
    }

    std::string memory_;
    std::vector<Epoch> written_;
    std::array<std::vector<Epoch>, kPipes> read_;
};

}  // namespace ascendc_model
