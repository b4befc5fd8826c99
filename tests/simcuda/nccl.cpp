// Implements both classes of NCCL for the simulated CUDA device: NCCL's streams, lifetimes and failures.
//
// ProcessGroupNCCL2 differs in its name, its device, its futures, its errors and in what an abort leaves.
//
// A collective publishes what this rank contributes in the store and returns. It ends when what it needs from
// other ranks is there; its results are fetched when an operator, another collective or the host needs them.

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <iostream>
#include <list>
#include <thread>

#include "device.h"

namespace simcuda {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<uint8_t>;
using Parts = std::vector<Bytes>;  // what ranks contributed
using Tensors = std::vector<at::Tensor>;
using Milliseconds = std::chrono::milliseconds;
using SteadyClock = std::chrono::steady_clock;

std::exception_ptr make_error(const std::string& message) {
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, message));
}

// ---- bytes of tensors

Bytes bytes_of(const Tensors& tensors) {
  Bytes bytes;
  for (const auto& tensor : tensors) {
    const auto packed = cpu_alias(tensor).contiguous();
    const auto* begin = static_cast<const uint8_t*>(packed.const_data_ptr());
    bytes.insert(bytes.end(), begin, begin + packed.nbytes());
  }
  return bytes;
}

// What another rank contributed, as a tensor of the CPU.
at::Tensor tensor_of(const Bytes& bytes, at::ScalarType dtype) {
  auto tensor = at::empty({int64_t(bytes.size() / c10::elementSize(dtype))}, at::TensorOptions().dtype(dtype));
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

// Where a result goes. Does not keep the memory: a program may drop what it does not read, and the checker has
// to see that.
class Output {
 public:
  explicit Output(const at::Tensor& tensor)
      : storage_(tensor.storage().getWeakStorageImpl()),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        offset_(tensor.storage_offset()),
        dtype(tensor.scalar_type()),
        nbytes(tensor.nbytes()) {}

  void put(const at::Tensor& values) const {
    auto storage = storage_.lock();
    if (!storage) return;
    const auto count = c10::multiply_integers(sizes_);
    TORCH_CHECK(values.numel() == count, "ranks differ in sizes: ", values.numel(), ", here ", count);
    auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    auto memory = static_cast<char*>(storage->mutable_data()) + offset_ * c10::elementSize(dtype);
    at::from_blob(memory, sizes_, strides_, [](void*) {}, options).copy_(values.view(sizes_));
  }
  void put(const Bytes& bytes) const { put(tensor_of(bytes, dtype)); }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  std::vector<int64_t> sizes_, strides_;
  int64_t offset_;

 public:
  at::ScalarType dtype;
  int64_t nbytes;
};

std::vector<Output> outputs_of(const Tensors& tensors) { return {tensors.begin(), tensors.end()}; }

void put_each(const std::vector<Output>& outputs, const Parts& parts) {
  for (size_t i = 0; i < outputs.size(); ++i) outputs[i].put(parts[i]);
}

// Fills each output with what starts at an offset of the same rank's contribution.
void put_slices(const std::vector<Output>& outputs, const Parts& parts, const std::vector<int64_t>& offsets) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    TORCH_CHECK(offsets[i] + outputs[i].nbytes <= int64_t(parts[i].size()), "ranks differ in sizes");
    const auto begin = parts[i].begin() + offsets[i];
    outputs[i].put(Bytes(begin, begin + outputs[i].nbytes));
  }
}

at::Tensor reduced(const Parts& parts, at::ScalarType dtype, const c10d::ReduceOp& op) {
  auto total = tensor_of(parts[0], dtype);
  for (size_t rank = 1; rank < parts.size(); ++rank) {
    TORCH_CHECK(parts[rank].size() == parts[0].size(), "ranks differ in sizes");
    const auto other = tensor_of(parts[rank], dtype);
    switch (op) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG:
        total = total.add(other);
        break;
      case c10d::ReduceOp::PRODUCT:
        total = total.mul(other);
        break;
      case c10d::ReduceOp::MIN:
        total = at::minimum(total, other);
        break;
      case c10d::ReduceOp::MAX:
        total = at::maximum(total, other);
        break;
      default:
        C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BAND, BOR or BXOR with NCCL");
    }
  }
  if (op == c10d::ReduceOp::AVG) {
    const auto count = static_cast<int64_t>(parts.size());
    total = at::isIntegralType(dtype, true) ? total.div(count, "trunc") : total.div(count);
  }
  return total.to(dtype);
}

// ---- what the ranks of a group tell each other

// The connection of a group. Once it is broken, everything that is on its way has ended with that error.
class Channel {
 public:
  // A group of the same name may have been there before, and its values still are: each has its own prefix.
  Channel(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
      : rank(rank), size(size), store_(store->clone()) {
    const auto generation = store_->add("generations/" + std::to_string(rank), 1);
    store_ = c10::make_intrusive<c10d::PrefixStore>(std::to_string(generation), store_);
  }

  void publish(const std::string& key, Bytes bytes) {
    bytes.push_back(0);  // no store knows an empty value
    store_->set(key, bytes);
  }
  bool has(const std::vector<std::string>& keys) { return keys.empty() || store_->check(keys); }
  Parts get(const std::vector<std::string>& keys) {
    if (keys.empty()) return {};
    auto values = store_->multiGet(keys);
    for (auto& value : values) value.pop_back();
    return values;
  }

  void fail(std::exception_ptr error, c10d::ErrorType type = c10d::ErrorType::COMM_ERROR) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) return;
    error_ = std::move(error);
    error_type_ = type;
  }
  std::exception_ptr error() {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }
  c10d::ErrorType error_type() {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_type_;
  }

  const int rank, size;
  const std::shared_ptr<std::atomic<bool>> is_aborted = std::make_shared<std::atomic<bool>>(false);

 private:
  c10d::ErrorType error_type_ = c10d::ErrorType::SUCCESS;
  c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;
  std::exception_ptr error_;
};

// The part of a collective that other ranks are needed for.
class Exchange final : public Pending {
 public:
  using Deliver = std::function<void(const Parts&)>;
  Exchange(std::shared_ptr<Channel> channel, std::vector<std::string> keys, Deliver deliver)
      : channel_(std::move(channel)), keys_(std::move(keys)), deliver_(std::move(deliver)) {}

  bool poll() override {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) return has_ended_;  // another thread is at it
    return poll_locked();
  }
  void finish() override {
    std::lock_guard<std::mutex> lock(mutex_);
    // Asked for again and again: a wait of the store could not be ended when the channel breaks.
    for (auto pause = 50us; !poll_locked(); pause = std::min(2 * pause, 2000us)) std::this_thread::sleep_for(pause);
  }
  bool has_ended() const { return has_ended_; }
  std::exception_ptr error() {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

 private:
  bool poll_locked() {
    if (has_ended_) return true;
    try {
      error_ = channel_->error();
      if (!error_) {
        if (!channel_->has(keys_)) return false;
        at::AutoDispatchBelowADInplaceOrView below;
        deliver_(channel_->get(keys_));
      }
    } catch (const std::exception&) {
      error_ = std::current_exception();
      channel_->fail(error_);
    }
    has_ended_ = true;
    return true;
  }

  std::shared_ptr<Channel> channel_;
  std::vector<std::string> keys_;
  Deliver deliver_;
  std::mutex mutex_;
  std::exception_ptr error_;
  std::atomic<bool> has_ended_{false};
};

// ---- works

struct Shelf {  // what a work keeps so that it is not given away under the collective
  std::mutex mutex;
  Tensors tensors;
  Tensors take() {
    std::lock_guard<std::mutex> lock(mutex);
    return std::exchange(tensors, {});
  }
};

c10::Stream current_c10_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device);
}

class WorkNCCL final : public c10d::Work {
 public:
  WorkNCCL(int rank, c10d::OpType type, c10::Device device, uint64_t number, Milliseconds timeout)
      : Work(rank, type), device_(device), number_(number), timeout_(timeout) {}

  bool isCompleted() override { return exception() || simcuda::has_ended(end); }
  bool isSuccess() const override { return !exception() && simcuda::has_ended(end); }
  std::exception_ptr exception() const override {
    for (const auto& exchange : exchanges) {
      if (auto error = exchange->has_ended() ? exchange->error() : channel->error()) return error;
    }
    return nullptr;
  }
  void synchronize() override {
    make_wait(current_stream(device_.index()), end);
    shelf->take();
  }
  bool wait(Milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout) {
      const auto deadline = SteadyClock::now() + timeout;
      while (!isCompleted()) {
        if (SteadyClock::now() >= deadline) {
          channel->fail(make_error(is_second ? "NCCL operation timed out" : describe() + " timed out in blocking wait."));
          break;
        }
        std::this_thread::sleep_for(1ms);
      }
      simcuda::synchronize(end, "wait for a collective with a timeout");
    } else if (is_barrier) {
      simcuda::synchronize(current_stream(device_.index()), "wait for a barrier");
    }
    if (auto error = exception()) std::rethrow_exception(error);
    return true;
  }
  void abort() override { channel->fail(make_error("NCCL communicator was aborted on rank " + std::to_string(rank_))); }
  Tensors result() override { return outputs; }
  // The one of NCCL2 is made when it is asked for, and orders the stream of whoever asks.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future) {
      synchronize();
      complete_future();
    }
    return future;
  }
  void complete_future() {
    future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_});
    future->markCompleted(at::IValue(outputs));
  }
  uint64_t getSequencenumber() const override { return number_; }

  std::string describe() const {
    int64_t size = 0;
    for (const auto& output : outputs) size += output.numel();
    return "[Rank " + std::to_string(rank_) + "] WorkNCCL(SeqNum=" + std::to_string(number_) +
           ", OpType=" + c10d::opTypeToString(opType_) + ", NumelOut=" + std::to_string(size) +
           ", Timeout(ms)=" + std::to_string(timeout_.count()) + ")";
  }

  Clock end;
  std::shared_ptr<Channel> channel;
  std::vector<std::shared_ptr<Exchange>> exchanges;
  std::shared_ptr<Shelf> shelf = std::make_shared<Shelf>();
  Tensors outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool is_barrier = false, is_second = false;

 private:
  const c10::Device device_;
  const uint64_t number_;
  const Milliseconds timeout_;
};

// ---- the watchdog

// What the watchdog needs of a work: not its tensors, which only threads of the program may free.
struct Watched {
  std::string description;
  SteadyClock::time_point deadline;
  Milliseconds timeout;
  Clock end;
  std::vector<std::shared_ptr<Exchange>> exchanges;
  std::shared_ptr<Shelf> shelf;

  bool has_ended() const {
    return std::all_of(exchanges.begin(), exchanges.end(), [](const auto& one) { return one->has_ended(); });
  }
  bool poll() const {
    return std::all_of(exchanges.begin(), exchanges.end(), [](const auto& one) { return one->poll(); });
  }
};

enum ErrorHandling { kNone = 0, kTearDown = 1, kCleanUpOnly = 2, kSkipCleanUp = 3 };

int number_in_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

// Keeps inputs and outputs of dropped works until the collective has ended, and ends what takes too long.
class Watchdog : public std::enable_shared_from_this<Watchdog> {
 public:
  Watchdog(std::shared_ptr<Channel> channel, bool is_second) : is_second_(is_second), channel_(std::move(channel)) {}

  void start() {
    if (handling_ == kNone && !is_second_) return;
    std::thread([self = shared_from_this()] { self->watch(); }).detach();  // the process may end at any time
  }
  void add(Watched watched) {
    release_ended();
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back(std::move(watched));
  }
  void finish_all() {
    std::list<Watched> watched;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      watched = watched_;
    }
    for (const auto& one : watched) {
      for (const auto& exchange : one.exchanges) exchange->finish();
    }
  }
  void stop() {
    std::list<Watched> all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_stopped_ = true;
      all.swap(watched_);
    }
    stopped_.notify_all();
    release(all);
  }

 private:
  // By a thread of the program, at its next collective.
  void release_ended() {
    std::list<Watched> ended;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto watched = watched_.begin(); watched != watched_.end();) {
        const auto next = std::next(watched);
        if (watched->has_ended()) ended.splice(ended.end(), watched_, watched);
        watched = next;
      }
    }
    release(ended);
  }
  // Without the lock: what is freed is reported to Python, for which another thread may have to go on.
  static void release(const std::list<Watched>& ended) {
    for (const auto& watched : ended) {
      for (const auto& tensor : watched.shelf->take()) kept_until(tensor.storage().data_ptr().get(), watched.end);
    }
  }
  void watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_.wait_for(lock, 100ms, [this] { return is_stopped_; })) {
      const auto now = SteadyClock::now();
      for (const auto& watched : watched_) {
        if (watched.has_ended() || watched.poll() || now < watched.deadline) continue;
        give_up(watched);
        return;
      }
    }
  }
  void give_up(const Watched& watched) {
    const auto ran = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - watched.deadline) + watched.timeout;
    const auto message = "[Rank " + std::to_string(channel_->rank) + "] Watchdog caught collective operation timeout: " +
                         watched.description + " ran for " + std::to_string(ran.count()) +
                         " milliseconds before timing out.";
    std::cerr << message << std::endl;
    if (is_second_) {
      channel_->fail(make_error("NCCL operation timed out"), c10d::ErrorType::TIMEOUT);
    } else {
      channel_->fail(make_error(message));
    }
    // an exception that leaves the watchdog's thread
    if (handling_ == kTearDown || handling_ == kSkipCleanUp) std::abort();
  }

  const bool is_second_;
  const int handling_ = number_in_environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", kSkipCleanUp);
  std::shared_ptr<Channel> channel_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool is_stopped_ = false;
  std::list<Watched> watched_;
};

// ---- the process group

class ProcessGroupNCCL : public c10d::Backend {
 public:
  struct Options final : Backend::Options {
    Options() : Backend::Options("nccl", 10min) {}
    bool is_high_priority_stream = false;
  };

  ProcessGroupNCCL(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options,
      bool is_second = false)
      : Backend(rank, size),
        is_second_(is_second),
        options_(std::move(options)),
        channel_(std::make_shared<Channel>(store, rank, size)),
        watchdog_(std::make_shared<Watchdog>(channel_, is_second)) {
    watchdog_->start();
    std::lock_guard<std::mutex> lock(all_mutex());
    all().push_back(channel_);
  }
  ~ProcessGroupNCCL() override { watchdog_->stop(); }

  // Channels of this process, for tests that break them.
  static std::mutex& all_mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::vector<std::weak_ptr<Channel>>& all() {
    static std::vector<std::weak_ptr<Channel>> channels;
    return channels;
  }

  const std::string getBackendName() const override { return is_second_ ? "nccl2" : "nccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void abort() override {
    *channel_->is_aborted = true;
    const auto type = is_second_ ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
    channel_->fail(
        is_second_ ? make_error("NCCL operation failed")
                   : make_error("NCCL communicator was aborted on rank " + std::to_string(rank_) + "."),
        type);
    watchdog_->stop();
  }
  // As NCCL's, it lets everything end first. Since NCCL 2.31 it waits for the other ranks, which may not come
  // after an abort.
  void shutdown() override {
    if (*channel_->is_aborted) misuse(getBackendName() + ": a communicator is destroyed after its abort");
    watchdog_->finish_all();
    channel_->fail(make_error("NCCL communicator was destroyed on rank " + std::to_string(rank_) + "."));
    watchdog_->stop();
  }
  c10d::ErrorType getError() override { return channel_->error_type(); }

  // Memory of a pool that the communicator has registered. Only a GPU with an NVLink switch offers it.
  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return number_in_environment("SIMULATED_CUDA_MULTICAST", 1) == 1;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    check_channel();
    check_device(options.device());
    const auto tensor = at::empty({size}, options);
    registered(tensor.const_data_ptr(), channel_->is_aborted);
    return tensor;
  }

  // ---- collectives

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto tensor = only(tensors);
    const auto op = options.reduceOp;
    return collect(
        {"nccl:all_reduce", c10d::OpType::ALLREDUCE, {tensor}, {tensor}, everybody(), options.asyncOp},
        [=, output = Output(tensor)](const Parts& parts) { output.put(reduced(parts, output.dtype, op)); });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto tensor = only(tensors);
    const int root = static_cast<int>(options.rootRank);
    const bool is_root = rank_ == root;
    return collect(
        {"nccl:broadcast", c10d::OpType::BROADCAST, is_root ? tensors : Tensors{}, is_root ? Tensors{} : tensors,
         {root}, options.asyncOp},
        [=, output = Output(tensor)](const Parts& parts) {
          if (!is_root) output.put(parts[0]);
        });
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    only(inputs);
    const auto targets = outputs.at(0);
    // NCCL gathers into one tensor, the first of what the future holds, and copies to those of the caller.
    auto sizes = inputs[0].sizes().vec();
    sizes.insert(sizes.begin(), size_);
    const auto gathered = at::empty(sizes, inputs[0].options());
    Tensors written{gathered};
    if (is_second_) written.clear();  // it sends to those of the caller
    written.insert(written.end(), targets.begin(), targets.end());
    return collect(
        {"nccl:all_gather", c10d::OpType::ALLGATHER, inputs, written, everybody(), options.asyncOp},
        [outputs = outputs_of(targets), slices = outputs_of(gathered.unbind(0))](const Parts& parts) {
          put_each(slices, parts);  // of memory that is gone, with NCCL2
          put_each(outputs, parts);
        });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (output.numel() != input.numel() * size_) {
      C10_THROW_ERROR(ValueError, "output tensor size must be equal to world_size times input tensor size");
    }
    return collect(
        {"nccl:_all_gather_base", c10d::OpType::_ALLGATHER_BASE, {input}, {output}, everybody(), options.asyncOp},
        [outputs = outputs_of(output.view({size_, -1}).unbind(0))](const Parts& parts) { put_each(outputs, parts); });
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    check(input);
    check(output);
    // Where each rank's part begins, for them to read: before the data.
    Bytes header(size_ * sizeof(int64_t));
    int64_t offset = header.size(), rank = 0;
    for (const auto& rows : split_rows(input, input_splits)) {
      std::memcpy(header.data() + rank++ * sizeof(int64_t), &offset, sizeof(int64_t));
      offset += rows.nbytes();
    }
    return collect(
        {"nccl:all_to_all", c10d::OpType::ALLTOALL, {input}, {output}, everybody(), options.asyncOp},
        [rank = rank_, targets = outputs_of(split_rows(output, output_splits))](const Parts& parts) {
          std::vector<int64_t> offsets(parts.size());
          for (size_t i = 0; i < parts.size(); ++i) {
            std::memcpy(&offsets[i], parts[i].data() + rank * sizeof(int64_t), sizeof(int64_t));
          }
          put_slices(targets, parts, offsets);
        },
        std::move(header));
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    auto device = bound_device_id_.value_or(c10::Device(c10::kCUDA, current_device()));
    if (!options.device_ids.empty()) device.set_index(options.device_ids[0]);
    const auto tensor = at::zeros({1}, at::TensorOptions().device(device));
    const auto op = c10d::ReduceOp(c10d::ReduceOp::SUM);
    auto work = collect(
        {"nccl:all_reduce_barrier", c10d::OpType::ALLREDUCE, {tensor}, {tensor}, everybody(), options.asyncOp},
        [=, output = Output(tensor)](const Parts& parts) { output.put(reduced(parts, output.dtype, op)); });
    if (work) {
      static_cast<WorkNCCL*>(work.get())->is_barrier = true;
    } else {
      synchronize(current_stream(device.index()), "barrier");
    }
    return work;
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int target, int) override {
    const auto tensor = only(tensors, /*must_be_contiguous=*/false);
    channel_->publish(peer_key(rank_, target), bytes_of(tensors_ready({tensor})));
    return queue({"nccl:send", c10d::OpType::SEND, {tensor}, {}, {}, true, target}, {}, [](const Parts&) {});
  }

  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int source, int) override {
    const auto tensor = only(tensors, /*must_be_contiguous=*/false);
    return queue(
        {"nccl:recv", c10d::OpType::RECV, {}, {tensor}, {}, true, source}, {peer_key(source, rank_)},
        [output = Output(tensor)](const Parts& parts) { output.put(parts[0]); });
  }

  // ---- coalescing

  void startCoalescing() override { coalesced_ = Coalesced{}; }

  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    auto all = std::exchange(coalesced_, std::nullopt);
    if (!all || !all->device) return nullptr;
    return finish_work(
        c10d::OpType::COALESCED, *all->device, *all->stream, all->inputs, all->outputs, all->exchanges, all->is_async);
  }

 private:
  struct Description {
    const char* name;
    c10d::OpType type;
    Tensors inputs, outputs;
    std::vector<int> sources;  // the ranks whose contributions are needed
    bool is_async;
    int peer = -1;  // of a send or a receive
  };
  struct Coalesced {
    std::optional<c10::Device> device;
    std::optional<c10::Stream> stream;
    Tensors inputs, outputs;
    std::vector<std::shared_ptr<Exchange>> exchanges;
    bool is_async = true;
  };

  static at::Tensor only(const Tensors& tensors, bool must_be_contiguous = true) {
    TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got multiple");
    check(tensors[0], must_be_contiguous);
    return tensors[0];
  }
  static void check(const at::Tensor& tensor, bool must_be_contiguous = true) {
    if (!tensor.is_cuda() || tensor.is_sparse()) C10_THROW_ERROR(ValueError, "Tensors must be CUDA and dense");
    if (must_be_contiguous && !tensor.is_contiguous(tensor.suggest_memory_format())) {
      C10_THROW_ERROR(ValueError, "Tensors must be contiguous");
    }
  }
  // NCCL2 has one device, from the start: if it is not told which, that of LOCAL_RANK.
  void check_device(c10::Device device) const {
    if (!is_second_) return;
    const auto& ranks = options_->global_ranks_in_group;
    const int global_rank = rank_ < int(ranks.size()) ? int(ranks[rank_]) : rank_;
    const int number = number_in_environment("LOCAL_RANK", global_rank) % c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
    const auto own = bound_device_id_.value_or(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(number)));
    TORCH_CHECK(
        device.index() == own.index(), "ProcessGroupNCCL is bound to device ", own,
        " but an operation was issued on ", device);
  }
  void check_channel() const {
    TORCH_CHECK(
        !is_second_ || !*channel_->is_aborted, "NCCL communicator was aborted after a previous error");
    if (auto error = channel_->error()) std::rethrow_exception(error);
  }
  std::vector<int> everybody() const {
    std::vector<int> ranks(size_);
    for (int rank = 0; rank < size_; ++rank) ranks[rank] = rank;
    return ranks;
  }
  Tensors split_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows) const {
    if (!rows.empty()) return tensor.split_with_sizes(rows);
    TORCH_CHECK(tensor.size(0) % size_ == 0, "Tensor's dim 0 does not divide equally across group size");
    return tensor.split(tensor.size(0) / size_);
  }

  // ---- how a collective is queued

  c10::intrusive_ptr<c10d::Work> collect(Description what, Exchange::Deliver deliver, Bytes header = {}) {
    const auto prefix = std::to_string(++number_) + "/";
    std::vector<std::string> keys;
    for (const int source : what.sources) keys.push_back(prefix + std::to_string(source));
    check_channel();
    if (!what.inputs.empty()) {
      const auto bytes = bytes_of(tensors_ready(what.inputs));
      header.insert(header.end(), bytes.begin(), bytes.end());
      channel_->publish(prefix + std::to_string(rank_), std::move(header));
    }
    return queue(std::move(what), std::move(keys), std::move(deliver));
  }

  // Inputs that an earlier collective has yet to write.
  const Tensors& tensors_ready(const Tensors& inputs) {
    std::vector<Use> uses;
    for (const auto& input : inputs) uses.push_back(use_of(input, false));
    finish_pending(uses);
    return inputs;
  }

  c10::intrusive_ptr<c10d::Work> queue(Description what, std::vector<std::string> keys, Exchange::Deliver deliver) {
    check_channel();
    const auto device = (what.inputs.empty() ? what.outputs : what.inputs).at(0).device();
    check_device(device);
    const auto stream = what.is_async ? own_stream(device, what.peer) : current_c10_stream(device);
    const Stream index = stream_of(stream.id(), stream.device_index());
    if (what.is_async) make_wait(index, record(current_stream(device.index())));

    std::vector<Use> writes;
    for (const auto& output : what.outputs) writes.push_back(use_of(output, true));
    std::vector<Use> uses = writes;
    for (const auto& input : what.inputs) uses.push_back(use_of(input, false));
    run(index, what.name, uses);
    auto exchange = std::make_shared<Exchange>(channel_, std::move(keys), std::move(deliver));
    add_pending(exchange, index, record(index), writes);

    if (coalesced_) {
      coalesced_->device = device;
      coalesced_->stream = stream;
      coalesced_->is_async = what.is_async;
      coalesced_->exchanges.push_back(exchange);
      coalesced_->inputs.insert(coalesced_->inputs.end(), what.inputs.begin(), what.inputs.end());
      coalesced_->outputs.insert(coalesced_->outputs.end(), what.outputs.begin(), what.outputs.end());
      return nullptr;
    }
    return finish_work(what.type, device, stream, what.inputs, what.outputs, {exchange}, what.is_async);
  }

  c10::intrusive_ptr<c10d::Work> finish_work(
      c10d::OpType type, c10::Device device, c10::Stream stream, const Tensors& inputs, const Tensors& outputs,
      std::vector<std::shared_ptr<Exchange>> exchanges, bool is_async) {
    auto work = c10::make_intrusive<WorkNCCL>(rank_, type, device, number_, options_->timeout);
    work->end = record(stream_of(stream.id(), stream.device_index()));
    work->channel = channel_;
    work->exchanges = std::move(exchanges);
    work->outputs = outputs;
    work->is_second = is_second_;
    if (is_async) {  // on the current stream nothing can overtake it
      work->shelf->tensors = inputs;
      work->shelf->tensors.insert(work->shelf->tensors.end(), outputs.begin(), outputs.end());
    }
    if (!is_second_) {
      c10::StreamGuard guard(stream);
      work->complete_future();
    }
    watchdog_->add(
        {work->describe(), SteadyClock::now() + options_->timeout, options_->timeout, work->end, work->exchanges,
         work->shelf});
    return is_async ? work : nullptr;
  }

  // One stream for the collectives of a device; a pair that sends and receives by itself has another.
  c10::Stream own_stream(c10::Device device, int peer) {
    std::string key = std::to_string(device.index());
    if (peer >= 0 && !coalesced_ && !bound_device_id_ && !is_second_) {
      key = std::to_string(std::min(rank_, peer)) + ":" + std::to_string(std::max(rank_, peer));
    }
    auto found = streams_.find(key);
    if (found == streams_.end()) {
      found = streams_.emplace(key, c10::impl::VirtualGuardImpl(c10::kCUDA).getNewStream(device)).first;
    }
    return found->second;
  }

  std::string peer_key(int from, int to) {
    const auto pair = std::to_string(from) + ">" + std::to_string(to);
    return pair + "/" + std::to_string(++peer_numbers_[pair]);
  }

  const bool is_second_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Channel> channel_;
  std::shared_ptr<Watchdog> watchdog_;
  std::map<std::string, c10::Stream> streams_;
  uint64_t number_ = 0;
  std::map<std::string, uint64_t> peer_numbers_;
  std::optional<Coalesced> coalesced_;
};

class ProcessGroupNCCL2 final : public ProcessGroupNCCL {
 public:
  ProcessGroupNCCL2(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options)
      : ProcessGroupNCCL(store, rank, size, std::move(options), true) {}
};

// ---- for tests: a network that breaks

void break_groups(const std::string& message) {
  std::lock_guard<std::mutex> lock(ProcessGroupNCCL::all_mutex());
  for (const auto& channel : ProcessGroupNCCL::all()) {
    if (auto present = channel.lock()) present->fail(make_error(message));
  }
}

}  // namespace
}  // namespace simcuda

// ---- torch's own reducer measures its steps with a timer of the device

namespace c10d {
namespace {

class SimulatedTimer final : public Timer {
 public:
  explicit SimulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto first = getTimestamp(start), second = getTimestamp(end);
    return first && second ? std::make_optional(*second - *first) : std::nullopt;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimulatedTimer)

}  // namespace
}  // namespace c10d

// ---- for Python

PYBIND11_MODULE(simnccl, module) {
  using Group = simcuda::ProcessGroupNCCL;
  using Group2 = simcuda::ProcessGroupNCCL2;
  using Options = Group::Options;
  namespace py = pybind11;

  auto group = py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(module, "ProcessGroupNCCL");
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(group, "Options")
      .def(py::init([](bool is_high_priority_stream) {
             auto options = c10::make_intrusive<Options>();
             options->is_high_priority_stream = is_high_priority_stream;
             return options;
           }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream)
      .def("__deepcopy__", [](const Options& options, const py::dict&) { return c10::make_intrusive<Options>(options); });
  const auto nothing = [](Group&) {};
  group
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                      const c10::intrusive_ptr<Options>& options) {
            py::gil_scoped_release release;
            return c10::make_intrusive<Group>(store, rank, size, options);
          }),
          py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                      const std::chrono::milliseconds& timeout) {
            auto options = c10::make_intrusive<Options>();
            options->timeout = timeout;
            py::gil_scoped_release release;
            return c10::make_intrusive<Group>(store, rank, size, options);
          }),
          py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout") = std::chrono::milliseconds(600000))
      .def("_group_start", nothing)
      .def("_group_end", nothing)
      .def("_set_default_timeout", &Group::setTimeout)
      .def("get_error", &Group::getError)
      .def_property_readonly("options", &Group::getBackendOptions);
  auto second = py::class_<Group2, c10::intrusive_ptr<Group2>, c10d::Backend>(module, "ProcessGroupNCCL2");
  second.attr("Options") = group.attr("Options");
  second
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                      const c10::intrusive_ptr<Options>& options, const std::optional<at::Device>& device_id) {
            py::gil_scoped_release release;
            auto made = c10::make_intrusive<Group2>(store, rank, size, options);
            made->setBoundDeviceId(device_id);
            return made;
          }),
          py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("device_id") = std::nullopt)
      .def("_set_default_timeout", &Group2::setTimeout)
      .def("get_error", &Group2::getError)
      .def_property_readonly("options", &Group2::getBackendOptions);
  module.def("break_groups", &simcuda::break_groups, py::call_guard<py::gil_scoped_release>());
  module.def("default_generator", [](int device) {
    return at::globalContext().defaultGenerator({c10::kCUDA, static_cast<c10::DeviceIndex>(device)});
  });
}
