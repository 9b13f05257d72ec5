// Tells torch that there are CUDA cards, so that tensors of them may have gradients and streams. It computes nothing.
//
// FakeTensorMode makes tensors that say "cuda:0" and have no memory, with any build of torch. But two parts of torch
// ask the device itself, in C++, where Python cannot answer: autograd (one thread for each card, and the stream on
// which a kernel has run) and whatever calls torch's CUDA hooks. Both look their answer up in a table, and this file
// writes our answers into these tables. guard.py compiles it, loads it and calls fake_card_install.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

int cards = 1;
thread_local c10::DeviceIndex current = 0;  // as in CUDA, each thread has a current card

c10::Device card(c10::DeviceIndex index) { return c10::Device(c10::DeviceType::CUDA, index); }

// What autograd asks. There is one stream a card, and all work on it is done at once.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return card(current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = card(current);
    current = device.index();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(cards); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

// What the rest of torch asks, "is there CUDA?" foremost. Its other questions keep the answers of a CPU build.
struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(cards); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex current_device() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    c10::DeviceIndex before = current;
    current = index;
    return before;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
};

Guard guard;

}  // namespace

// Preferred to the hooks of a CUDA build, and found when torch asks for the first time: load this file before that.
namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, ::Hooks)
}

// The table of guards has one place for CUDA, which a CUDA build has filled already.
extern "C" void fake_card_install(int number) {
  cards = number;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
