// See streams.h. Nothing here is ever destroyed: threads go on to the end of the process.
#include "streams.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace late {
namespace {

std::atomic<int64_t> delay_us{2000};

struct Streams {
  std::mutex mutex;
  std::vector<std::vector<std::unique_ptr<Stream>>> of_device{kDevices};
};

Streams& streams() {
  static auto* const all = [] {
    auto* made = new Streams;
    for (auto& device : made->of_device) device.push_back(std::make_unique<Stream>());
    return made;
  }();
  return *all;
}

constexpr int kHost = -1;
constexpr unsigned char kPoison = 0xFF;  // in every float dtype a NaN

using StreamKey = std::pair<int, int64_t>;

struct Block {
  unsigned char* start;
  size_t bytes;
  StreamKey owner;  // kHost for pinned memory
  std::set<StreamKey> uses;
};

struct Memory {
  std::mutex mutex;
  std::map<const unsigned char*, Block*> live;
  std::multimap<std::pair<StreamKey, size_t>, Block*> free;
  int64_t num_reused = 0;

  Block* find(const void* address) {
    const auto* const byte = static_cast<const unsigned char*>(address);
    auto after = live.upper_bound(byte);
    if (after == live.begin()) return nullptr;
    Block* const block = std::prev(after)->second;
    return byte < block->start + block->bytes ? block : nullptr;
  }
};

Memory& memory() {
  static auto* const all = new Memory;
  return *all;
}

void* take(size_t bytes, StreamKey owner) {
  if (bytes == 0) return nullptr;
  bytes = (bytes + 63) / 64 * 64;
  const std::lock_guard<std::mutex> lock(memory().mutex);
  Block* block = nullptr;
  const auto found = memory().free.find({owner, bytes});
  if (found != memory().free.end()) {
    block = found->second;
    memory().free.erase(found);
    ++memory().num_reused;
  } else {
    block = new Block{static_cast<unsigned char*>(std::aligned_alloc(64, bytes)), bytes, owner, {}};
    if (block->start == nullptr) throw std::bad_alloc();
    std::memset(block->start, kPoison, bytes);
  }
  memory().live[block->start] = block;
  return block->start;
}

void give_back(Block* block) {
  std::memset(block->start, kPoison, block->bytes);
  const std::lock_guard<std::mutex> lock(memory().mutex);
  memory().free.insert({{block->owner, block->bytes}, block});
}

struct Gates {
  std::mutex mutex;
  std::map<int64_t, MarkPtr> open;
  int64_t next = 0;
};

Gates& gates() {
  static auto* const all = new Gates;
  return *all;
}

}  // namespace

void Mark::set() {
  const std::lock_guard<std::mutex> lock(mutex_);
  set_ = true;
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return set_; });
}

bool Mark::is_set() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

Stream::Stream() {
  std::thread([this] { serve(); }).detach();
}

void Stream::note(std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  filled_.notify_one();
}

void Stream::work(std::function<void()> task) {
  note([task = std::move(task)] {
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    task();
  });
}

MarkPtr Stream::mark() {
  auto mark = std::make_shared<Mark>();
  note([mark] { mark->set(); });
  return mark;
}

bool Stream::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !busy_;
}

void Stream::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    filled_.wait(lock, [this] { return !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    busy_ = false;
  }
}

Stream& stream(int device, int64_t id) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  return *streams().of_device.at(device).at(id);
}

int64_t new_stream(int device) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  auto& all = streams().of_device.at(device);
  all.push_back(std::make_unique<Stream>());
  return static_cast<int64_t>(all.size()) - 1;
}

void synchronize(int device) {
  std::vector<MarkPtr> marks;
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    for (auto& each : streams().of_device.at(device)) marks.push_back(each->mark());
  }
  for (auto& mark : marks) mark->wait();
}

void* allocate(size_t bytes, int device, int64_t stream_id) {
  return take(bytes, {device, stream_id});
}

void* allocate_pinned(size_t bytes) {
  return take(bytes, {kHost, 0});
}

void release(void* start) {
  if (start == nullptr) return;
  Block* block = nullptr;
  std::set<StreamKey> waits;
  {
    const std::lock_guard<std::mutex> lock(memory().mutex);
    block = memory().find(start);
    memory().live.erase(block->start);
    waits = std::exchange(block->uses, {});
  }
  if (block->owner.first != kHost) waits.insert(block->owner);
  if (waits.empty()) return give_back(block);
  auto left = std::make_shared<std::atomic<size_t>>(waits.size());
  for (const auto& [device, id] : waits) {
    stream(device, id).note([block, left] {
      if (--*left == 0) give_back(block);
    });
  }
}

void use(const void* address, int device, int64_t stream_id) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  Block* const block = memory().find(address);
  if (block != nullptr) block->uses.insert({device, stream_id});
}

bool is_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const Block* const block = memory().find(address);
  return block != nullptr && block->owner.first == kHost;
}

}  // namespace late

// What tests steer the device by, for ctypes.
extern "C" {

void late_set_delay_us(int64_t delay) {
  late::delay_us = delay;
}

int64_t late_num_reused() {
  const std::lock_guard<std::mutex> lock(late::memory().mutex);
  return late::memory().num_reused;
}

/// Queue a gate on a stream: nothing behind it is done before `late_open`.
int64_t late_close(int device, int64_t stream_id) {
  auto gate = std::make_shared<late::Mark>();
  late::stream(device, stream_id).note([gate] { gate->wait(); });
  const std::lock_guard<std::mutex> lock(late::gates().mutex);
  late::gates().open[late::gates().next] = gate;
  return late::gates().next++;
}

void late_open(int64_t gate) {
  const std::lock_guard<std::mutex> lock(late::gates().mutex);
  const auto found = late::gates().open.find(gate);
  if (found == late::gates().open.end()) return;
  found->second->set();
  late::gates().open.erase(found);
}

}  // extern "C"
