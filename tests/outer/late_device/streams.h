// Streams, events and memory of the simulated device, without torch: queues that threads serve, late on purpose.
//
// All times are real. Whoever reads without having waited reads poison or old values, as from a device.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace late {

constexpr int kDevices = 2;

/// Becomes true once, and can be waited for.
class Mark {
 public:
  void set();
  void wait();
  bool is_set();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

using MarkPtr = std::shared_ptr<Mark>;

/// A queue of tasks in their order, served by a thread of its own.
class Stream {
 public:
  Stream();
  /// Queue work, which begins no sooner than the device's delay after its turn has come.
  void work(std::function<void()> task);
  /// Queue what takes no time: marks, waits and the allocator's bookkeeping.
  void note(std::function<void()> task);
  /// A mark that is set once all that is queued now has been done.
  MarkPtr mark();
  bool idle();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
};

/// Stream `id` of a device; 0 is its default stream.
Stream& stream(int device, int64_t id);
/// The id of a new stream.
int64_t new_stream(int device);
/// Wait for all streams of a device.
void synchronize(int device);

/// Memory of a device, for the work of one of its streams; of no known content, as memory of a device.
///
/// Freed, it is handed out again once the work that was queued on that stream, and on those that were noted by `use`,
/// is done: not a task later, and poisoned by then. So work of a stream that wasn't noted reads or overwrites what is
/// somebody else's.
void* allocate(size_t bytes, int device, int64_t stream_id);
/// Pinned memory of the host. Freed, it is poisoned at once, unless `use` was noted of it.
void* allocate_pinned(size_t bytes);
void release(void* block);
/// Note that a stream uses the block in which `address` lies.
void use(const void* address, int device, int64_t stream_id);
bool is_pinned(const void* address);

}  // namespace late
