// The simulated device as torch's PrivateUse1 backend: guard, hooks, allocators, and the few operators that it has.
//
// What it has is queued on the current stream, as on a device; all else is done on the CPU, after that stream's work, and
// refuses tensors of the CPU among its own, as a device does.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>

#include "streams.h"

namespace late {
namespace {

constexpr auto kLate = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<int64_t, kDevices> current_stream{};

c10::DeviceIndex index_of(c10::Device device) {
  const auto index = device.has_index() ? device.index() : current_device;
  TORCH_CHECK(index >= 0 && index < kDevices, "the simulated device has no index ", int(index));
  return index;
}

int64_t stream_of(c10::Device device) {
  return current_stream[index_of(device)];
}

Stream& queue_of(const c10::Stream& each) {
  return stream(each.device_index(), each.id());
}

/// An event's state at its latest record; who waits keeps it.
struct Event {
  MarkPtr mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kLate;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kLate, current_device};
  }
  void setDevice(c10::Device device) const override {
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  c10::Stream getStream(c10::Device device) const override {
    return named(device, stream_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return named(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return named(device, new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream each) const override {
    const auto before = getStream(each.device());
    current_stream[each.device_index()] = each.id();
    return before;
  }
  bool queryStream(const c10::Stream& each) const override {
    return queue_of(each).idle();
  }
  void synchronizeStream(const c10::Stream& each) const override {
    queue_of(each).mark()->wait();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize(device);
  }
  void record(void** event, const c10::Stream& each, const c10::DeviceIndex device, const c10::EventFlag)
      const override {
    TORCH_CHECK(device == -1 || device == each.device_index(), "an event stays with the device of its first stream");
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->mark = queue_of(each).mark();
  }
  void block(void* event, const c10::Stream& each) const override {
    queue_of(each).note([mark = static_cast<Event*>(event)->mark] { mark->wait(); });
  }
  bool queryEvent(void* event) const override {
    return static_cast<Event*>(event)->mark->is_set();
  }
  void synchronizeEvent(void* event) const override {
    static_cast<Event*>(event)->mark->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& each) const override {
    use(data.get(), each.device_index(), each.id());
  }

 private:
  static c10::Stream named(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kLate, index_of(device)), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device{kLate, current_device};
    void* const start = late::allocate(bytes, current_device, stream_of(device));
    return {start, start, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "memory of the simulated device is copied by tensors only");
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const start = allocate_pinned(bytes);
    return {start, start, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(kLate, &device_memory)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device = index_of({kLate, device});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device;
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

/// The same memory as a tensor of the CPU that owns nothing: tasks use it when their turn comes, whoever has it then.
at::Tensor on_cpu(const at::Tensor& each) {
  TORCH_CHECK(!each.is_conj() && !each.is_neg(), "the simulated device has no lazy conjugates");
  return at::from_blob(
      each.mutable_data_ptr(), each.sizes(), each.strides(), at::TensorOptions(c10::kCPU).dtype(each.scalar_type()));
}

void work_on(c10::Device device, std::function<void()> task) {
  stream(index_of(device), stream_of(device)).work([task = std::move(task)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    task();
  });
}

void wait_for(c10::Device device) {
  stream(index_of(device), stream_of(device)).mark()->wait();
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

/// A copy to, from or on a device. Only with pinned memory, and when asked to, it returns before it is done.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const bool to_device = target.is_privateuseone(), from_device = self.is_privateuseone();
  const auto device = from_device ? self.device() : target.device();
  const bool between = to_device && from_device && self.device() != target.device();
  if (between) wait_for(target.device());
  work_on(device, [source = on_cpu(self.expand(target.sizes())), target = on_cpu(target)] { target.copy_(source); });
  if (between) wait_for(device);
  if (to_device && from_device) return target;
  const void* const host = (from_device ? target : self).const_data_ptr();
  if (non_blocking && is_pinned(host)) {
    use(host, index_of(device), stream_of(device));
  } else {
    wait_for(device);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (self.sizes() != target.sizes()) {  // a result that torch makes empty and the operator then sizes
    const auto sized = at::empty(self.sizes(), target.options());
    target.unsafeGetTensorImpl()->set_storage_keep_dtype(sized.storage());
    target.unsafeGetTensorImpl()->set_sizes_contiguous(self.sizes());
  }
  return copy_from(self, target, false);
}

at::Tensor& add_(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  const auto addend = other.is_cpu() ? other.clone() : on_cpu(other);
  work_on(self.device(), [target = on_cpu(self), addend, alpha] { target.add_(addend, alpha); });
  return self;
}

at::Tensor& fill_(at::Tensor& self, const at::Scalar& value) {
  work_on(self.device(), [target = on_cpu(self), value] { target.fill_(value); });
  return self;
}

at::Tensor& zero_(at::Tensor& self) {
  return fill_(self, 0);
}

void record_stream(at::Tensor& self, c10::Stream each) {
  use(self.storage().data(), each.device_index(), each.id());
}

/// Whether an argument is a tensor of the CPU that a device would refuse: one number it would take.
bool is_elsewhere(const at::Tensor& each) {
  return each.defined() && each.is_cpu() && each.dim() > 0;
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto& each : torch::jit::last(*stack, op.schema().arguments().size())) {
    bool elsewhere = each.isTensor() && is_elsewhere(each.toTensor());
    if (each.isTensorList()) {
      for (const at::Tensor& one : each.toTensorList()) elsewhere |= is_elsewhere(one);
    }
    TORCH_CHECK(!elsewhere, "the simulated device was given a tensor of the CPU beside its own: ", op.schema().name());
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("unfold", &at::native::unfold);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("add_.Tensor", &add_);
  m.impl("fill_.Scalar", &fill_);
  m.impl("zero_", &zero_);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

}  // namespace
}  // namespace late
