#ifdef TAPETUNE_CATCH2_V2
#define CATCH_CONFIG_RUNNER
#endif
#include "catch.h"
#include "core/signals.h"

int main(int argc, char** argv) {
  tapetune::catch_signals();
  return Catch::Session().run(argc, argv);
}
