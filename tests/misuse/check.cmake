# Compiles misuse.cpp with the compiler CXX and the headers in SOURCE. Without MISUSE the file must compile. With
# MISUSE, each line marked "// error: WORD" must give an error whose message contains WORD.
set(file ${SOURCE}/tests/misuse/misuse.cpp)
set(compile ${CXX} -std=c++20 -fsyntax-only -Wall -Wextra -Werror -I${SOURCE} ${file})
execute_process(COMMAND ${compile} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${compile} -DMISUSE ERROR_VARIABLE messages)

file(READ ${file} text)
string(REGEX REPLACE "[][;]" "" text "${text}")  # these characters are special in CMake lists
string(REPLACE "\n" ";" lines "${text}")
set(number 0)
set(checked 0)
foreach(line IN LISTS lines)
  math(EXPR number "${number} + 1")
  if(line MATCHES "// error: ([a-z_]+)")
    math(EXPR checked "${checked} + 1")
    if(NOT messages MATCHES "misuse.cpp:${number}:[0-9]+: error: [^\n]*${CMAKE_MATCH_1}")
      message(FATAL_ERROR "line ${number} does not give the expected error: ${line}\n${messages}")
    endif()
  endif()
endforeach()
if(NOT checked EQUAL 14 OR NOT messages MATCHES "use_copy_")
  message(FATAL_ERROR "expected 14 marked lines and an error that contains use_copy_; found ${checked} marked lines "
                      "and these messages:\n${messages}")
endif()
