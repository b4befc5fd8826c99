// Gives the parts of the simulated CUDA device that are written against torch what they share.
#pragma once

#include <ATen/core/Tensor.h>

#include "checker.h"

namespace simcuda {

// The stream that this thread queues on, on that device.
Stream current_stream(int device);
int current_device();
inline c10::Device cuda(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

// The same memory as a tensor of the CPU, for its kernels. Does not own it.
at::Tensor cpu_alias(const at::Tensor& tensor);

// The bytes from the first to the last element. What lies between the elements of a view counts as touched.
Use use_of(const at::Tensor& tensor, bool writes);

}  // namespace simcuda
