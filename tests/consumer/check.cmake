# Installs the build in BUILD, then configures, builds and runs SOURCE against it.
function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(work ${BUILD}/consumer)
file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix)
file(GLOB_RECURSE private ${work}/prefix/*/checks.h ${work}/prefix/*/input_file.h ${work}/prefix/*/gzip_file.h
     ${work}/prefix/*/seed.h)
if(private)
  message(FATAL_ERROR "headers that are not for users are installed: ${private}")
endif()
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${work}/build -G Ninja -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_PREFIX_PATH=${work}/prefix)
run(${CMAKE_COMMAND} --build ${work}/build)
run(${CMAKE_COMMAND} -E chdir ${work} ${work}/build/consumer)
