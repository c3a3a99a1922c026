#include "distributed/meeting_place.h"

namespace tapetune {

c10::intrusive_ptr<c10d::TCPStore> open_meeting_place() {
  c10d::TCPStoreOptions options;
  options.port = 0;  // any that is free
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

}  // namespace tapetune
