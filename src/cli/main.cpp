#include "cli/run.h"

int main(int argc, char** argv) { return tapetune::run_cli(argc, argv); }
