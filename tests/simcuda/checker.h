// Orders operations on simulated CUDA streams by vector clocks and reports what the order leaves open.
//
// Knows nothing of torch. Every operation is told to the checker with the bytes that it reads and writes. Two
// operations conflict when they touch the same bytes, at least one writes, and neither is ordered after the
// other by its stream, an event or a wait of the host. Data is another matter: operations run at once, in the
// order of the host, so a conflict shows in the reports and not in the numbers.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace simcuda {

constexpr int kDevices = 8;  // that there may be; there are two unless SIMULATED_CUDA_DEVICES says otherwise

// One stream of one device as one number, the position of its time in a clock.
using Stream = int;
inline Stream stream_of(int64_t id, int device) { return static_cast<Stream>(id) * kDevices + device; }
inline int device_of(Stream stream) { return stream % kDevices; }

// For every stream: up to which of its operations something is ordered.
class Clock {
 public:
  uint64_t at(Stream stream) const { return stream < int(times_.size()) ? times_[stream] : 0; }
  void join(const Clock& other);
  uint64_t advance(Stream stream);

 private:
  std::vector<uint64_t> times_;
};

struct Use {
  const void* begin;
  size_t bytes;
  bool writes;
};

// ---- operations

// An operation on `stream`. Waits first, as the simulation's own business, for pending ones that write to these
// bytes: their results have to be there.
void run(Stream stream, const std::string& operation, const std::vector<Use>& uses);
void finish_pending(const std::vector<Use>& uses);  // the waiting alone

// What is ordered before everything that is queued on `stream` from now on; an event keeps it.
Clock record(Stream stream);
void make_wait(Stream stream, const Clock& clock);

// ---- the host

// The host waits until all that `clock` covers has ended: reported as `sync`.
void synchronize(const Clock& clock, const std::string& why);
void synchronize(Stream stream, const std::string& why);
void synchronize_device(int device);

// Whether all that `clock` covers has ended. From then on the host may rely on that, as after a wait.
bool has_ended(const Clock& clock);

// ---- memory

// `is_pinned`: memory of the host, whose allocator looks after frees by itself.
void allocated(void* block, size_t bytes, Stream stream, bool is_pinned);
void freed(void* block);
bool is_pinned(const void* address);
int device_at(const void* address);  // -1: not memory of a device

// As Tensor.record_stream: the block is not given away before `stream` has done what is queued when it is freed.
void use_on(const void* address, Stream stream);

// The communicator of NCCL with this flag has registered the block: nothing may use it once it is aborted.
void registered(const void* address, std::shared_ptr<const std::atomic<bool>> is_aborted);

// Somebody kept the block until what `clock` covers had ended, so that freeing it now is safe with regard to it.
void kept_until(const void* address, const Clock& clock);

uint64_t bytes_allocated(int device);

// ---- what ends only when other ranks have done their part

class Pending {
 public:
  virtual ~Pending() = default;
  virtual bool poll() = 0;     // whether it has ended; does not block
  virtual void finish() = 0;  // returns when it has ended, or never will
};

// `end` covers it and nothing after it on its stream; `outputs`: the bytes that it writes when it ends.
void add_pending(std::shared_ptr<Pending> pending, Stream stream, const Clock& end, const std::vector<Use>& outputs);

// ---- reports

// A wrong use of NCCL that no order of streams shows: reported as `nccl`.
void misuse(const std::string& what);

using Callback = void (*)(const char* kind, const char* text);
void set_callback(Callback callback);

// Nothing is checked or reported while it is off; streams and events are followed all the same.
void set_enabled(bool enabled);

}  // namespace simcuda
