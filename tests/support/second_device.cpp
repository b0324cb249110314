// A second type of device, for tests: its memory is the host's, and what it computes the CPU computes.
#include <ATen/autocast_mode.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// Counts what is allocated.
struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> guard(lock);
    if (memory != nullptr) sizes[memory] = bytes;
    live += bytes;
    most = std::max(most, live);
    return {memory, memory, &free, c10::Device(kDevice, 0)};
  }
  static void free(void* memory);
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  std::mutex lock;
  std::unordered_map<void*, size_t> sizes;
  size_t live = 0, most = 0;
};
HostMemory memory;

void HostMemory::free(void* freed) {
  {
    std::lock_guard<std::mutex> guard(memory.lock);
    const auto known = memory.sizes.find(freed);
    if (known != memory.sizes.end()) {
      memory.live -= known->second;
      memory.sizes.erase(known);
    }
  }
  c10::GetCPUAllocator()->raw_deleter()(freed);
}
REGISTER_ALLOCATOR(kDevice, &memory);

// Everything is done at once: there is nothing to wait for.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = memory.allocate(bytes);
    const auto kept = std::min(bytes, storage.nbytes());
    if (kept > 0) memory.copy_data(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.set_nbytes(bytes);
  }
};

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

// The same memory, as the CPU sees it; it is there for as long as it is seen, as what is being sent must be.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
  auto* owner = new c10::Storage(tensor.storage());
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), owner->nbytes(),
      c10::DataPtr(owner->mutable_data(), owner, [](void* held) { delete static_cast<c10::Storage*>(held); },
                   c10::Device(c10::DeviceType::CPU)),
      nullptr, false);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  seen.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) seen = seen.conj();
  return seen;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(self));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  on_host(target).copy_(on_host(self));
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) { return on_host(self).item(); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

using Tensors = std::vector<at::Tensor>;
using c10d::Work;

// What a device's own library sends: nothing that is on the host.
struct OnlyFromDevice final : c10d::Backend {
  OnlyFromDevice(c10::intrusive_ptr<c10d::Backend> wire, py::function make)
      : c10d::Backend(wire->getRank(), wire->getSize()), wire_(std::move(wire)), make_(make.release()) {}

  struct Options final : c10d::Backend::Options {
    Options() : c10d::Backend::Options("only_from_device") {}
  };

  const std::string getBackendName() const override { return "only_from_device"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return c10::make_intrusive<Options>(); }
  void setSequenceNumberForGroup() override {}
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) override {
    const auto place = std::find(ranks.begin(), ranks.end(), getRank());
    if (place == ranks.end()) return nullptr;
    auto own = c10::make_intrusive<c10d::PrefixStore>("only_from_device/" + options->group_name, store);
    py::gil_scoped_acquire gil;
    const auto made = make_(c10::static_intrusive_pointer_cast<c10d::Store>(own), place - ranks.begin(), ranks.size(),
                            options->timeout);
    return made.cast<c10::intrusive_ptr<c10d::Backend>>();
  }
  void setTimeout(std::chrono::milliseconds timeout) override { wire_->setTimeout(timeout); }

  static at::Tensor sent(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == kDevice, "a collective of a device was given a tensor on ", tensor.device());
    return on_host(tensor);
  }
  static Tensors sent(const Tensors& tensors) {
    Tensors found;
    for (const auto& tensor : tensors) found.push_back(sent(tensor));
    return found;
  }
  static std::vector<Tensors> sent(const std::vector<Tensors>& lists) {
    std::vector<Tensors> found;
    for (const auto& tensors : lists) found.push_back(sent(tensors));
    return found;
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& x, const c10d::AllreduceOptions& options) override {
    auto tensors = sent(x);
    return wire_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& x, const c10d::BroadcastOptions& options) override {
    auto tensors = sent(x);
    return wire_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& y, Tensors& x, const c10d::AllgatherOptions& o) override {
    auto out = sent(y);
    auto in = sent(x);
    return wire_->allgather(out, in, o);
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& y, at::Tensor& x, const c10d::AllgatherOptions& o) override {
    auto out = sent(y), in = sent(x);
    return wire_->_allgather_base(out, in, o);
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& y, at::Tensor& x,
                                                const c10d::ReduceScatterOptions& o) override {
    auto out = sent(y), in = sent(x);
    return wire_->_reduce_scatter_base(out, in, o);
  }
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& y, at::Tensor& x, std::vector<int64_t>& ys,
                                         std::vector<int64_t>& xs, const c10d::AllToAllOptions& o) override {
    auto out = sent(y), in = sent(x);
    return wire_->alltoall_base(out, in, ys, xs, o);
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& x, const c10d::AllreduceCoalescedOptions& o) override {
    auto tensors = sent(x);
    return wire_->allreduce_coalesced(tensors, o);
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& y, Tensors& x,
                                                           const c10d::AllgatherOptions& o) override {
    auto out = sent(y), in = sent(x);
    return wire_->allgather_into_tensor_coalesced(out, in, o);
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& y, Tensors& x,
                                                           const c10d::ReduceScatterOptions& o) override {
    auto out = sent(y), in = sent(x);
    return wire_->reduce_scatter_tensor_coalesced(out, in, o);
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override { return wire_->barrier(options); }

 private:
  c10::intrusive_ptr<c10d::Backend> wire_;
  py::handle make_;  // for ever: makes one like this of a store, a rank, a size and a timeout
};

c10::intrusive_ptr<c10d::Backend> only_from_device(const c10::intrusive_ptr<c10d::Backend>& wire, py::function make) {
  return c10::make_intrusive<OnlyFromDevice>(wire, std::move(make));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  using Options = OnlyFromDevice::Options;
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(m, "Options")
      .def("__deepcopy__", [](const Options& self, const py::dict&) { return c10::make_intrusive<Options>(self); });
  m.def("options_of", [](const c10::intrusive_ptr<c10d::Backend>& backend) { return backend->getBackendOptions(); });
  m.def("only_from_device", &only_from_device);
  m.def("allocated", [] { return memory.live; });
  m.def("most_allocated", [] { return memory.most; });
  m.def("begin_most_allocated", [] { memory.most = memory.live; });
}
