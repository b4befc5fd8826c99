// Runs torch's operators on the simulated CUDA device: the CPU's kernels on the same memory, told to the checker.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

#include "device.h"

namespace simcuda {

Use use_of(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0 || !tensor.has_storage()) {
    return {nullptr, 0, writes};
  }
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.sizes()[d] - 1) * tensor.strides()[d];
  const auto* storage = static_cast<const char*>(tensor.storage().data_ptr().get());
  return {storage + tensor.storage_offset() * tensor.itemsize(), (last + 1) * tensor.itemsize(), writes};
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      tensor.storage().nbytes(),
      c10::DataPtr(tensor.storage().data_ptr().get(), c10::Device(c10::kCPU)),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

namespace {

c10::Allocator* allocator() { return at::detail::getCUDAHooks().getCUDADeviceAllocator(); }

at::Tensor make_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int device) {
  c10::DeviceGuard guard(cuda(device));
  return at::Tensor(at::detail::empty_strided_generic(
      sizes, strides, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
}

// Memory of at least so many bytes for a tensor, with what it held before.
void grow(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) return;
  c10::DeviceGuard guard(tensor.device());
  auto grown = allocator()->allocate(bytes);
  if (storage->nbytes()) std::memcpy(grown.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(grown));
  storage->set_nbytes(bytes);
}

// ---- what makes the host wait

const std::set<std::string> kReadByHost = {
    "aten::_local_scalar_dense", "aten::equal",   "aten::nonzero",           "aten::masked_select",
    "aten::_unique",             "aten::_unique2", "aten::unique_dim",        "aten::unique_consecutive",
    "aten::bincount",            "aten::nonzero.out", "aten::masked_select.out", "aten::unique_dim_consecutive"};

bool is_mask(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}

// Why the kernel of a GPU would make the host wait; empty where it would not. Before the stack is changed.
// (An index that is a mask or on the CPU has become `nonzero` or a copy before it gets here, except to write.)
std::string reason_to_wait(const std::string& operation, const torch::jit::Stack& stack, size_t first) {
  if (kReadByHost.count(operation)) return operation;
  if (operation == "aten::repeat_interleave.Tensor") return stack[first + 1].isNone() ? operation : "";
  if (operation != "aten::_index_put_impl_") return "";
  int masks = 0, others = 0;
  bool is_on_cpu = false;
  for (const auto& index : stack[first + 1].toOptionalTensorVector()) {
    if (!index || !index->defined()) continue;
    is_mask(*index) ? ++masks : ++others;
    is_on_cpu |= !index->is_cuda();
  }
  if (is_on_cpu) return operation + " with indices on the CPU";
  // x[mask] = number is done without counting the mask
  const bool is_fill = masks == 1 && others == 0 && stack[first + 2].toTensor().numel() == 1;
  return masks == 0 || is_fill ? "" : operation + " with a mask";
}

// ---- the kernel of every operator that has none of its own

enum class Role { kInput, kOutput, kView };

struct Argument {
  at::Tensor device, alias;
  Role role;
};

// CUDA copies the indices of these to the device of the rest, and of no others.
bool may_mix_devices(const std::string& operation) {
  return operation.rfind("aten::index.Tensor", 0) == 0 || operation == "aten::_index_put_impl_";
}

// Schemas tell what is written, but not that these move the running statistics along.
Role role_of(const std::string& operation, const c10::Argument& argument, const torch::jit::Stack& stack, size_t first) {
  if (const auto* alias = argument.alias_info()) return alias->isWrite() ? Role::kOutput : Role::kView;
  if (argument.name() != "running_mean" && argument.name() != "running_var") return Role::kInput;
  const bool is_norm = operation == "aten::native_batch_norm" || operation == "aten::native_batch_norm.out";
  const bool is_training = is_norm && stack[first + 5].toBool();
  return is_training || operation == "aten::batch_norm_update_stats" ? Role::kOutput : Role::kInput;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(*stack), name_(toString(op.operator_name())), first_(stack->size() - arity()) {}

  void execute() {
    const std::string wait = reason_to_wait(name_, stack_, first_);
    replace_arguments();
    if (device_ < 0) device_ = current_device();
    c10::DeviceGuard guard(cuda(device_));
    const Stream stream = current_stream(device_);
    std::vector<Use> uses;
    for (const auto& argument : arguments_) {
      if (argument.role != Role::kView) uses.push_back(use_of(argument.device, argument.role == Role::kOutput));
    }
    run(stream, name_, uses);
    if (!wait.empty()) synchronize(stream, wait);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    take_over_resized();
    replace_results();
    for (const auto& made : made_) run(stream, name_, {use_of(made, true)});
  }

 private:
  size_t arity() const { return op_.schema().arguments().size(); }

  at::Tensor to_cpu(const at::Tensor& tensor, Role role) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_cpu_tensor_ |= tensor.dim() > 0;
      return tensor;
    }
    if (device_ < 0) device_ = tensor.device().index();
    TORCH_CHECK(
        device_ == tensor.device().index(), "Expected all tensors to be on the same device, but found at least two ",
        "devices, cuda:", device_, " and ", tensor.device(), "! (", name_, ")");
    // An empty output is resized by the kernel: it gets memory of its own, which is taken over afterwards.
    const bool is_empty_output = role == Role::kOutput && tensor.storage().nbytes() == 0;
    auto alias = is_empty_output ? at::empty({0}, at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU))
                                 : cpu_alias(tensor);
    arguments_.push_back({tensor, alias, role});
    return alias;
  }

  void replace_arguments() {
    for (size_t i = 0; i < arity(); ++i) {
      const auto& argument = op_.schema().arguments()[i];
      const Role role = role_of(name_, argument, stack_, first_);
      auto& value = stack_[first_ + i];
      if (value.isTensor()) {
        value = to_cpu(value.toTensor(), role);
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> list;
        for (const auto& tensor : value.toTensorVector()) list.push_back(to_cpu(tensor, role));
        value = c10::List<at::Tensor>(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& tensor : value.toOptionalTensorVector()) {
          list.push_back(tensor ? std::make_optional(to_cpu(*tensor, role)) : std::nullopt);
        }
        value = list;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        if (device_ < 0) device_ = value.toDevice().has_index() ? value.toDevice().index() : current_device();
        value = c10::Device(c10::kCPU);
      } else if (value.isNone() && argument.type()->str() == "Generator?") {
        value = at::detail::getCUDAHooks().getDefaultGenerator(device_);
      }
    }
    TORCH_CHECK(
        !has_cpu_tensor_ || arguments_.empty() || may_mix_devices(name_),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", device_,
        " and cpu! (", name_, ")");
  }

  void take_over_resized() {
    for (auto& [tensor, alias, role] : arguments_) {
      if (tensor.storage().nbytes() || !alias.numel()) continue;
      grow(tensor, alias.storage().nbytes());
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), 0);
      std::memcpy(tensor.storage().mutable_data(), alias.storage().data(), alias.storage().nbytes());
      made_.push_back(tensor);
    }
  }

  // The kernel's result as a tensor of the device: an argument, a view of one, or new memory.
  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu() || arguments_.empty()) return result;
    for (const auto& [tensor, alias, role] : arguments_) {
      if (!alias.is_same(result)) continue;
      if (tensor.sizes() != result.sizes() || tensor.strides() != result.strides()) {
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
            result.sizes(), result.strides(), result.storage_offset());
      }
      return tensor;
    }
    for (const auto& [tensor, alias, role] : arguments_) {
      const bool is_view = result.has_storage() && tensor.storage().nbytes() &&
                           result.storage().data_ptr().get() == tensor.storage().data_ptr().get();
      if (!is_view) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), result.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
      if (result.is_conj()) view._set_conj(true);
      return view;
    }
    at::AutoDispatchBelowADInplaceOrView below;
    auto made = make_tensor(result.sizes(), result.strides(), result.scalar_type(), device_);
    if (result.numel()) cpu_alias(made).copy_(result);
    made_.push_back(made);
    return made;
  }

  void replace_results() {
    const size_t count = op_.schema().returns().size();
    for (size_t i = stack_.size() - count; i < stack_.size(); ++i) {
      auto& value = stack_[i];
      if (value.isTensor()) {
        value = to_device(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> list;
        for (const auto& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
        value = c10::List<at::Tensor>(list);
      }
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const std::string name_;
  const size_t first_;
  int device_ = -1;
  bool has_cpu_tensor_ = false;
  std::vector<Argument> arguments_;
  std::vector<at::Tensor> made_;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call(op, stack).execute();
}

// ---- kernels of its own: memory, and copies between devices

int index_of(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

at::Tensor empty(
    c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(cuda(index_of(device)));
  return at::Tensor(at::detail::empty_generic(
      sizes, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  return make_tensor(sizes, strides, c10::dtype_or_default(dtype), index_of(device));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  grow(self, (self.storage_offset() + self.numel()) * self.itemsize());
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  if (strides.empty() && !sizes.empty()) {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  use_on(self.storage().data_ptr().get(), stream_of(stream));
}

// As CUDA's: on the current stream of the source, which waits for that of the target, and the target for it.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const int from = source.is_cuda() ? source.device().index() : self.device().index();
  const int to = self.is_cuda() ? self.device().index() : from;
  const Stream stream = current_stream(from);
  if (from != to) make_wait(stream, record(current_stream(to)));
  run(stream, "aten::copy_", {use_of(source, false), use_of(self, true)});
  if (from != to) make_wait(current_stream(to), record(stream));
  if (!self.is_cuda() || !source.is_cuda()) {
    const at::Tensor& host = self.is_cuda() ? source : self;
    const bool is_pageable = host.numel() && !is_pinned(host.storage().data_ptr().get());
    if (!non_blocking) {
      synchronize(stream, source.is_cuda() ? "copy to the CPU" : "copy from the CPU");
    } else if (source.is_cuda() && is_pageable) {
      // The driver returns when it has filled memory that is not pinned, whatever it is asked for.
      synchronize(stream, "non_blocking copy to memory of the CPU that is not pinned");
    }
  }
  at::AutoDispatchBelowADInplaceOrView below;
  auto target = self.is_cuda() ? cpu_alias(self) : self;
  target.copy_(source.is_cuda() ? cpu_alias(source) : source);
  return self;
}

}  // namespace
}  // namespace simcuda

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&simcuda::run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(simcuda::empty));
  library.impl("empty_strided", TORCH_FN(simcuda::empty_strided));
  library.impl("copy_", TORCH_FN(simcuda::copy_));
  library.impl("record_stream", TORCH_FN(simcuda::record_stream));
  library.impl("resize_", TORCH_FN(simcuda::resize_));
  library.impl("set_.source_Storage", TORCH_FN(simcuda::set_whole_storage));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(simcuda::set_storage));
  // Written for all devices in terms of others, of which a GPU has more than a CPU.
  for (const char* name : {"convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&simcuda::run_on_cpu>());
  }
}
