// Registers devices of type CUDA with a torch that was built for the CPU: devices, streams, events, memory.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace simcuda {
namespace {

thread_local int this_device = 0;
thread_local std::array<int64_t, kDevices> this_stream_id{};

int num_devices() {
  const char* text = std::getenv("SIMULATED_CUDA_DEVICES");
  return text ? std::atoi(text) : 2;
}

int index_of(c10::Device device) {
  const int index = device.has_index() ? device.index() : this_device;
  TORCH_CHECK(0 <= index && index < num_devices(), "CUDA error: invalid device ordinal");
  return index;
}

Stream stream_of(const c10::Stream& stream) { return simcuda::stream_of(stream.id(), stream.device_index()); }

// ---- memory

// As the caching allocator of CUDA: a block belongs to the stream that is current when it is allocated, and is
// given away there when it is freed. It is not given to anybody here, so that no conflict can go unseen.
constexpr size_t kAlignment = 512;

void* allocate_block(size_t bytes, bool is_pinned) {
  void* block = nullptr;
  const size_t rounded = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  TORCH_CHECK(posix_memalign(&block, kAlignment, rounded) == 0, "out of memory");
  if (!is_pinned) std::memset(block, 0xFF, rounded);  // NaN or -1: a device does not clear its memory either
  allocated(block, rounded, current_stream(this_device), is_pinned);
  return block;
}

void free_block(void* block) {
  freed(block);
  std::free(block);
}

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(bool is_pinned) : is_pinned_(is_pinned) {}
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = is_pinned_ ? c10::Device(c10::kCPU) : cuda(this_device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    void* block = allocate_block(bytes, is_pinned_);
    return {block, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  bool is_pinned_;
};

Allocator device_allocator(false), pinned_allocator(true);

// ---- devices, streams and events

struct Event {
  Clock clock;
  int device;
  std::chrono::steady_clock::time_point time;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }

  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = this_device;
    this_device = index_of(device);
    return cuda(before);
  }
  c10::Device getDevice() const override { return cuda(this_device); }
  void setDevice(c10::Device device) const override { this_device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { this_device = device.index(); }

  c10::Stream getStream(c10::Device device) const override {
    return make_stream(this_stream_id[index_of(device)], device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(0, device); }
  // CUDA has a pool of 32, which orders by accident what the program does not. This one is larger, and bounded
  // for the sake of the clocks, which know every stream.
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> number{0};
    return make_stream(1 + number++ % 1024, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& id = this_stream_id[index_of(stream.device())];
    return make_stream(std::exchange(id, stream.id()), stream.device());
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override { return has_ended(simcuda::record(stream_of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream_of(stream), "synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    const int device = index_of(stream.device());
    *event = new Event{simcuda::record(stream_of(stream)), device, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) make_wait(stream_of(stream), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override { return !event || has_ended(static_cast<Event*>(event)->clock); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(static_cast<Event*>(event)->clock, "synchronize an event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    const auto &first = *static_cast<Event*>(start), &second = *static_cast<Event*>(end);
    TORCH_CHECK(first.device == second.device, "CUDA error: invalid resource handle (events of two devices)");
    TORCH_CHECK(has_ended(first.clock) && has_ended(second.clock), "CUDA error: device not ready");
    return std::chrono::duration<double, std::milli>(second.time - first.time).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_on(data.get(), stream_of(stream));
  }

 private:
  static c10::Stream make_stream(int64_t id, c10::Device device) {
    return c10::Stream(c10::Stream::UNSAFE, cuda(index_of(device)), id);
  }
};

// ---- what the rest of torch asks of a CUDA build

class Hooks : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  int getNumGPUs() const override { return num_devices(); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(this_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { this_device = index_of(cuda(device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(this_device, index_of(cuda(device))));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Device getDeviceFromPtr(void* address) const override { return cuda(std::max(0, device_at(address))); }

  // Numbers come from the CPU's kernels, so from its kind of generator, but one for each device.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* const generators = [] {
      auto* const made = new std::array<at::Generator, kDevices>;
      for (at::Generator& generator : *made) generator = at::detail::createCPUGenerator();
      return made;
    }();
    return (*generators)[device < 0 ? this_device : device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct RegisterAllocator {
  RegisterAllocator() { c10::SetAllocator(c10::kCUDA, &device_allocator, 255); }
} register_allocator;

}  // namespace

int current_device() { return this_device; }
Stream current_stream(int device) { return simcuda::stream_of(this_stream_id[device], device); }

}  // namespace simcuda

namespace at {
using SimulatedHooks = simcuda::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
}  // namespace at
