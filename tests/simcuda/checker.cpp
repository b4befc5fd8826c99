// Keeps clocks of streams, logs of memory blocks and pending operations of the simulated CUDA device.

#include "checker.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>

namespace simcuda {
namespace {

// The `epoch`-th operation of `stream` touched [begin, end).
struct Access {
  uintptr_t begin, end;
  Stream stream;
  uint64_t epoch;
  bool writes;
  bool is_over;  // whoever frees the block need not mind this access any more
  std::string operation;
};

struct Block {
  size_t bytes;
  Stream stream;  // that it was allocated on, and will be given away on
  bool is_pinned;
  std::vector<Access> log;
  std::set<Stream> recorded;
  std::shared_ptr<const std::atomic<bool>> is_aborted;  // whether the communicator is that registered it
};

struct PendingEntry {
  std::shared_ptr<Pending> pending;
  Stream stream;
  uint64_t epoch;
  std::vector<Use> outputs;
};

struct State {
  std::mutex mutex;  // never held while Python runs or while another rank is waited for
  std::map<uintptr_t, Block> blocks;
  std::vector<Clock> streams;
  Clock host;  // what the host knows to have ended; all of its threads share what they know
  std::vector<PendingEntry> pending;
  std::array<uint64_t, kDevices> bytes_allocated{};
  bool is_enabled = true;
  Callback callback = nullptr;
};

// Never destroyed: tensors are freed after the destructors of static objects have run.
State& state() {
  static auto* const instance = new State;
  return *instance;
}

using Lock = std::lock_guard<std::mutex>;

// Reports of one call, told to Python when the lock has been released.
class Findings {
 public:
  void add(const char* kind, std::string text) { found_.emplace_back(kind, std::move(text)); }
  ~Findings() {
    if (state().callback) {
      for (const auto& [kind, text] : found_) state().callback(kind, text.c_str());
    }
  }

 private:
  std::vector<std::pair<const char*, std::string>> found_;
};

std::string name(Stream stream) {
  return "cuda:" + std::to_string(device_of(stream)) + "/s" + std::to_string(stream / kDevices);
}

Clock& clock_of(Stream stream) {
  auto& streams = state().streams;
  if (stream >= int(streams.size())) streams.resize(stream + 1);
  return streams[stream];
}

// The clock of a stream as of now: what the host knows to have ended is behind all that it queues.
Clock& current(Stream stream) {
  Clock& clock = clock_of(stream);
  clock.join(state().host);
  return clock;
}

std::map<uintptr_t, Block>::iterator find_block(const void* address) {
  auto& blocks = state().blocks;
  auto next = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (next == blocks.begin()) return blocks.end();
  auto block = std::prev(next);
  return reinterpret_cast<uintptr_t>(address) < block->first + block->second.bytes ? block : blocks.end();
}

void log_use(Stream stream, const Use& use, const std::string& operation, Findings& findings) {
  auto block = find_block(use.begin);
  if (block == state().blocks.end() || use.bytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(use.begin), end = begin + use.bytes;
  const auto& is_aborted = block->second.is_aborted;
  if (is_aborted && *is_aborted) {
    const std::string how = use.writes ? "written" : "read";
    findings.add("nccl", "memory that NCCL has registered is " + how + " by " + operation + " after the abort");
  }
  const Clock& clock = clock_of(stream);
  std::vector<Access> kept;
  for (Access& access : block->second.log) {
    const bool overlaps = access.begin < end && begin < access.end;
    const bool is_ordered = access.stream == stream || clock.at(access.stream) >= access.epoch;
    if (overlaps && (access.writes || use.writes) && !is_ordered) {
      std::ostringstream text;
      text << (use.writes ? "write" : "read") << " by " << operation << " on " << name(stream)
           << " is not ordered after " << (access.writes ? "write" : "read") << " by " << access.operation << " on "
           << name(access.stream) << " (" << use.bytes << " bytes)";
      findings.add("race", text.str());
    }
    // What the new access stands for from now on: all that comes after it comes after the old one as well.
    const bool is_covered = begin <= access.begin && access.end <= end;
    const bool is_repeated_read = !use.writes && !access.writes && access.stream == stream;
    if (!(is_covered && ((use.writes && is_ordered) || is_repeated_read))) kept.push_back(std::move(access));
  }
  kept.push_back({begin, end, stream, clock.at(stream), use.writes, false, operation});
  block->second.log = std::move(kept);
}

bool overlap(const Use& a, const Use& b) {
  const auto a_begin = reinterpret_cast<uintptr_t>(a.begin), b_begin = reinterpret_cast<uintptr_t>(b.begin);
  return a_begin < b_begin + b.bytes && b_begin < a_begin + a.bytes;
}

template <typename Matches>
std::vector<std::shared_ptr<Pending>> pending_that(Matches matches) {
  std::vector<std::shared_ptr<Pending>> found;
  for (const auto& entry : state().pending) {
    if (matches(entry)) found.push_back(entry.pending);
  }
  return found;
}

std::vector<std::shared_ptr<Pending>> pending_before(const Clock& clock) {
  return pending_that([&](const PendingEntry& entry) { return clock.at(entry.stream) >= entry.epoch; });
}

// Without the lock: blocks until other ranks have done their part.
void finish(const std::vector<std::shared_ptr<Pending>>& ended) {
  for (const auto& pending : ended) pending->finish();
  Lock lock(state().mutex);
  auto& all = state().pending;
  const auto has_ended = [&](const PendingEntry& entry) {
    return std::find(ended.begin(), ended.end(), entry.pending) != ended.end();
  };
  all.erase(std::remove_if(all.begin(), all.end(), has_ended), all.end());
}

// The host knows that all this has ended. A test that only looks, with the checker off, teaches it nothing.
void learn(const Clock& clock) {
  Lock lock(state().mutex);
  if (state().is_enabled) state().host.join(clock);
}

}  // namespace

void Clock::join(const Clock& other) {
  if (times_.size() < other.times_.size()) times_.resize(other.times_.size());
  for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
}

uint64_t Clock::advance(Stream stream) {
  if (stream >= int(times_.size())) times_.resize(stream + 1);
  return ++times_[stream];
}

// ---- operations

void finish_pending(const std::vector<Use>& uses) {
  std::vector<std::shared_ptr<Pending>> needed;
  {
    Lock lock(state().mutex);
    needed = pending_that([&](const PendingEntry& entry) {
      return std::any_of(uses.begin(), uses.end(), [&](const Use& use) {
        return std::any_of(
            entry.outputs.begin(), entry.outputs.end(), [&](const Use& output) { return overlap(use, output); });
      });
    });
  }
  if (!needed.empty()) finish(needed);
}

void run(Stream stream, const std::string& operation, const std::vector<Use>& uses) {
  finish_pending(uses);
  Findings findings;
  Lock lock(state().mutex);
  if (!state().is_enabled) return;
  current(stream).advance(stream);
  for (const Use& use : uses) log_use(stream, use, operation, findings);
}

Clock record(Stream stream) {
  Lock lock(state().mutex);
  return current(stream);
}

void make_wait(Stream stream, const Clock& clock) {
  Lock lock(state().mutex);
  clock_of(stream).join(clock);
}

// ---- the host

void synchronize(const Clock& clock, const std::string& why) {
  Findings findings;
  std::vector<std::shared_ptr<Pending>> unfinished;
  {
    Lock lock(state().mutex);
    unfinished = pending_before(clock);
    if (state().is_enabled) findings.add("sync", why);
  }
  if (!unfinished.empty()) finish(unfinished);
  learn(clock);
}

void synchronize(Stream stream, const std::string& why) {
  synchronize(record(stream), why + " on " + name(stream));
}

void synchronize_device(int device) {
  Clock all;
  {
    Lock lock(state().mutex);
    auto& streams = state().streams;
    for (Stream stream = device; stream < int(streams.size()); stream += kDevices) all.join(streams[stream]);
  }
  synchronize(all, "synchronize cuda:" + std::to_string(device));
}

bool has_ended(const Clock& clock) {
  std::vector<std::shared_ptr<Pending>> unfinished;
  {
    Lock lock(state().mutex);
    unfinished = pending_before(clock);
  }
  for (const auto& pending : unfinished) {
    if (!pending->poll()) return false;
  }
  if (!unfinished.empty()) finish(unfinished);
  learn(clock);
  return true;
}

// ---- memory

void allocated(void* block, size_t bytes, Stream stream, bool is_pinned) {
  Lock lock(state().mutex);
  state().blocks[reinterpret_cast<uintptr_t>(block)] = Block{bytes, stream, is_pinned, {}, {}, {}};
  if (!is_pinned) state().bytes_allocated[device_of(stream)] += bytes;
}

void freed(void* address) {
  Findings findings;
  Lock lock(state().mutex);
  auto found = state().blocks.find(reinterpret_cast<uintptr_t>(address));
  if (found == state().blocks.end()) return;
  const Block& block = found->second;
  if (!block.is_pinned) {
    state().bytes_allocated[device_of(block.stream)] -= block.bytes;
    const Clock& clock = current(block.stream);
    std::set<Stream> told;
    for (const Access& access : block.log) {
      const bool is_ordered = access.stream == block.stream || clock.at(access.stream) >= access.epoch;
      if (is_ordered || access.is_over || block.recorded.count(access.stream) || !state().is_enabled) continue;
      if (!told.insert(access.stream).second) continue;
      findings.add(
          "free", std::to_string(block.bytes) + " bytes of " + name(block.stream) + " are freed while " +
                      name(access.stream) + " may still " + (access.writes ? "write" : "read") + " them (" +
                      access.operation + ")");
    }
  }
  state().blocks.erase(found);
}

bool is_pinned(const void* address) {
  Lock lock(state().mutex);
  auto block = find_block(address);
  return block != state().blocks.end() && block->second.is_pinned;
}

int device_at(const void* address) {
  Lock lock(state().mutex);
  auto block = find_block(address);
  return block == state().blocks.end() || block->second.is_pinned ? -1 : device_of(block->second.stream);
}

void use_on(const void* address, Stream stream) {
  Lock lock(state().mutex);
  auto block = find_block(address);
  if (block != state().blocks.end()) block->second.recorded.insert(stream);
}

void registered(const void* address, std::shared_ptr<const std::atomic<bool>> is_aborted) {
  Lock lock(state().mutex);
  auto block = find_block(address);
  if (block != state().blocks.end()) block->second.is_aborted = std::move(is_aborted);
}

void kept_until(const void* address, const Clock& clock) {
  Lock lock(state().mutex);
  auto block = find_block(address);
  if (block == state().blocks.end()) return;
  for (Access& access : block->second.log) access.is_over |= clock.at(access.stream) >= access.epoch;
}

uint64_t bytes_allocated(int device) {
  Lock lock(state().mutex);
  return state().bytes_allocated[device];
}

// ---- what ends only when other ranks have done their part

void add_pending(std::shared_ptr<Pending> pending, Stream stream, const Clock& end, const std::vector<Use>& outputs) {
  Lock lock(state().mutex);
  state().pending.push_back({std::move(pending), stream, end.at(stream), outputs});
}

// ---- reports

void misuse(const std::string& what) {
  Findings findings;
  Lock lock(state().mutex);
  if (state().is_enabled) findings.add("nccl", what);
}

void set_callback(Callback callback) { state().callback = callback; }

void set_enabled(bool enabled) {
  Lock lock(state().mutex);
  state().is_enabled = enabled;
}

}  // namespace simcuda

// ---- for Python, through ctypes

extern "C" {

void simcuda_set_callback(simcuda::Callback callback) { simcuda::set_callback(callback); }
void simcuda_set_enabled(int enabled) { simcuda::set_enabled(enabled != 0); }
uint64_t simcuda_bytes_allocated(int device) { return simcuda::bytes_allocated(device); }
}
