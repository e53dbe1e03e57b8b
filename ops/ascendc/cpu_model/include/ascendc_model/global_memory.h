// Global memory: the buffers a kernel may touch, and which core touched each byte.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shadow.h"

namespace ascendc_model {

class GlobalBuffer {
public:
    GlobalBuffer(std::string name, void* data, uint64_t bytes, bool writable)
        : name_(std::move(name)),
          data_(static_cast<uint8_t*>(data)),
          bytes_(bytes),
          writable_(writable),
          races_("global buffer '" + name_ + "'", bytes),
          writer_(bytes, kNobody),
          reader_(bytes, kNobody)
    {
    }

    const std::string& name() const { return name_; }
    uint8_t* data() const { return data_; }
    uint64_t bytes() const { return bytes_; }
    bool Contains(const uint8_t* address) const { return address >= data_ && address <= data_ + bytes_; }

    void CheckRead(const Range& range, uint32_t core, const VectorClock& clock) const
    {
        CheckInside(range);
        for (uint64_t at = range.begin; at < range.end; ++at) {
            Require(writer_[at] == kNobody || writer_[at] == core, "core-conflict", "reads byte ", at,
                    " of global buffer '", name_, "' that core ", writer_[at],
                    " writes in the same launch; cores run in any order, so give each core its own rows");
        }
        races_.CheckRead(range, clock);
    }

    void CheckWrite(const Range& range, uint32_t core, const VectorClock& clock) const
    {
        CheckInside(range);
        Require(writable_, "gm-read-only", "writes global buffer '", name_, "', which is an input");
        for (uint64_t at = range.begin; at < range.end; ++at) {
            Require(writer_[at] == kNobody || writer_[at] == core, "core-conflict", "writes byte ", at,
                    " of global buffer '", name_, "' that core ", writer_[at], " has written as well");
            Require(reader_[at] == kNobody || reader_[at] == core, "core-conflict", "writes byte ", at,
                    " of global buffer '", name_, "' that another core reads in the same launch");
        }
        races_.CheckWrite(range, clock);
    }

    void RecordRead(const Range& range, uint32_t core, Epoch now)
    {
        for (uint64_t at = range.begin; at < range.end; ++at) {
            reader_[at] = reader_[at] == kNobody || reader_[at] == core ? static_cast<uint16_t>(core) : kSeveral;
        }
        races_.RecordRead(range, now);
    }

    void RecordWrite(const Range& range, uint32_t core, Epoch now)
    {
        std::fill(writer_.begin() + range.begin, writer_.begin() + range.end, static_cast<uint16_t>(core));
        races_.RecordWrite(range, now);
    }

private:
    static constexpr uint16_t kNobody = 0xffff;
    static constexpr uint16_t kSeveral = 0xfffe;

    void CheckInside(const Range& range) const
    {
        Require(range.end <= bytes_, "gm-bounds", "touches bytes [", range.begin, ", ", range.end,
                ") of global buffer '", name_, "', which has ", bytes_, " bytes");
    }

    std::string name_;
    uint8_t* data_;
    uint64_t bytes_;
    bool writable_;
    RaceShadow races_;
    std::vector<uint16_t> writer_;
    std::vector<uint16_t> reader_;
};

class GlobalMemory {
public:
    void Register(const std::string& name, void* data, uint64_t bytes, bool writable)
    { buffers_.push_back(std::make_unique<GlobalBuffer>(name, data, bytes, writable)); }

    GlobalBuffer& Find(const uint8_t* address) const
    {
        for (const auto& buffer : buffers_) {
            if (buffer->bytes() > 0 && buffer->Contains(address) && address != buffer->data() + buffer->bytes()) {
                return *buffer;
            }
        }
        Fail("gm-bounds", "the address is in none of the ", buffers_.size(), " buffers passed to the kernel");
    }

private:
    std::vector<std::unique_ptr<GlobalBuffer>> buffers_;
};

}  // namespace ascendc_model
