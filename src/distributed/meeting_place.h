// For whoever starts ranks on this machine: where they meet.
#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace tapetune {

// At any free port, for as long as somebody holds it.
c10::intrusive_ptr<c10d::TCPStore> open_meeting_place();

}  // namespace tapetune
