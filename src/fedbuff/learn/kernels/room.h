// Memory for numbers: `make` room for new ones, which nobody has set yet, or `get` those that are there.

#pragma once

#include <memory>

#include "vectors.h"

template <class Number> struct Room {
  std::unique_ptr<Number[]> numbers;
  i64 size = 0;
  Number* make(i64 count) {
    if (count > size) numbers.reset(new Number[size = count]);
    return numbers.get();
  }
  Number* get() { return numbers.get(); }
};
