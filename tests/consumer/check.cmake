# Installs voxgrad and builds the consumer project against it. BUILD is voxgrad's build folder and SOURCE is the folder
# of this file. CXX is the C++ compiler. NVCC is the CUDA compiler, which may be empty.
function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# configure(NAME OPTIONS...) configures the consumer in ${work}/NAME.
function(configure name)
  run(${CMAKE_COMMAND} -S ${SOURCE} -B ${work}/${name} -G Ninja -DCMAKE_CXX_COMPILER=${CXX} -DDECOYS=${work}/decoys ${ARGN})
endfunction()

set(work ${BUILD}/consumer)
set(voxgrad ${SOURCE}/../..)
file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix)
file(GLOB_RECURSE private ${work}/prefix/*/checks.h ${work}/prefix/*/input_file.h ${work}/prefix/*/gzip_file.h
     ${work}/prefix/*/json.h ${work}/prefix/*/philox.h)
if(private)
  message(FATAL_ERROR "internal headers are installed: ${private}")
endif()

# Writes the decoys: files with the names of voxgrad's headers. If voxgrad includes a decoy, the compilation fails.
file(GLOB_RECURSE headers RELATIVE ${work}/prefix/include/voxgrad ${work}/prefix/include/voxgrad/*.h)
foreach(header ${headers})
  get_filename_component(name ${header} NAME)
  foreach(decoy ${header} ${name} voxgrad/${header})
    file(WRITE ${work}/decoys/${decoy} "#error voxgrad includes a header of the project that uses it\n")
  endforeach()
endforeach()

# Builds the consumer against the installed library, with MPI hidden from the consumer, and runs it.
configure(installed -DCMAKE_PREFIX_PATH=${work}/prefix -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON)
run(${CMAKE_COMMAND} --build ${work}/installed --target consumer)
run(${CMAKE_COMMAND} -E chdir ${work} ${work}/installed/consumer)

# Does the same with pkg-config and without CMake.
find_program(PKG_CONFIG pkg-config)
if(PKG_CONFIG)
  file(GLOB_RECURSE file ${work}/prefix/voxgrad.pc)
  get_filename_component(folder ${file} DIRECTORY)
  set(static --static)
  if(EXISTS ${folder}/../libvoxgrad.so)
    set(static)
  endif()
  run(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${folder} ${SOURCE}/check-pkg-config ${work}/pkg-config ${CXX} ${static})
endif()

# Checks that a shared library exports the namespace voxgrad and nothing else.
file(GLOB_RECURSE shared ${work}/prefix/libvoxgrad.so)
if(shared)
  execute_process(COMMAND nm --dynamic --defined-only ${shared} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "[^\n]*(7voxgrad[^\n]*@@VOXGRAD_| A VOXGRAD_)[^\n]*\n" "" others "${symbols}")
  if(others OR NOT symbols)
    message(FATAL_ERROR "symbols outside of the namespace voxgrad are exported:\n${others}")
  endif()
endif()

# Compiles the consumer with voxgrad as a subdirectory, which FetchContent adds. To save time, builds only the target
# `main`, which does not build voxgrad itself.
configure(subdirectory -DVOXGRAD_SOURCE=${voxgrad} -DVOXGRAD_CUDA=OFF)
run(${CMAKE_COMMAND} --build ${work}/subdirectory --target main)

# Checks that CMake does not pass /usr/include to the compiler by -I or -isystem if this folder contains NCCL's header.
# The compiler searches the folder by default, and the option would change the search order.
if(NVCC)
  configure(nccl -DVOXGRAD_SOURCE=${voxgrad} -DVOXGRAD_CUDA=ON -DVOXGRAD_NCCL=ON -DCMAKE_CUDA_COMPILER=${NVCC}
    -DNCCL_INCLUDE_DIR=/usr/include -DNCCL_LIBRARY=${work}/libnccl.so -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
  file(STRINGS ${work}/nccl/compile_commands.json commands REGEX "-(I|isystem) ?/usr/include ")
  if(commands)
    message(FATAL_ERROR "/usr/include is passed to the compiler: ${commands}")
  endif()
endif()
