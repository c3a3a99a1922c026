#pragma once

#include <exception>
#include <stdexcept>

// What Gloo throws, to tell it from other exceptions; only its type is used.
namespace gloo {

class Exception : public std::runtime_error {
  using std::runtime_error::runtime_error;
};
class EnforceNotMet : public std::exception {};

}  // namespace gloo
