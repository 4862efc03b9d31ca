# Uses voxgrad as other projects do. BUILD: voxgrad's build folder, SOURCE: this folder, CXX: the compiler.
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
     ${work}/prefix/*/json.h ${work}/prefix/*/seed.h)
if(private)
  message(FATAL_ERROR "headers that are not for users are installed: ${private}")
endif()

# The consumer has headers of the same names.
file(GLOB_RECURSE headers RELATIVE ${work}/prefix/include/voxgrad ${work}/prefix/include/voxgrad/*.h)
foreach(header ${headers})
  get_filename_component(name ${header} NAME)
  foreach(decoy ${header} ${name} voxgrad/${header})
    file(WRITE ${work}/decoys/${decoy} "#error voxgrad includes a header of the project that uses it\n")
  endforeach()
endforeach()

# Installed, on a machine without MPI.
configure(installed -DCMAKE_PREFIX_PATH=${work}/prefix -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON)
run(${CMAKE_COMMAND} --build ${work}/installed --target consumer)
run(${CMAKE_COMMAND} -E chdir ${work} ${work}/installed/consumer)

# As a subdirectory. voxgrad itself is not built again.
configure(subdirectory -DVOXGRAD_SOURCE=${voxgrad} -DVOXGRAD_CUDA=OFF)
run(${CMAKE_COMMAND} --build ${work}/subdirectory --target main)

# No folder that the compiler searches anyway is passed to it, wherever NCCL lies.
if(NVCC)
  configure(nccl -DVOXGRAD_SOURCE=${voxgrad} -DVOXGRAD_CUDA=ON -DVOXGRAD_NCCL=ON -DCMAKE_CUDA_COMPILER=${NVCC}
    -DNCCL_INCLUDE_DIR=/usr/include -DNCCL_LIBRARY=${work}/libnccl.so -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
  file(STRINGS ${work}/nccl/compile_commands.json commands REGEX "-(I|isystem) ?/usr/include ")
  if(commands)
    message(FATAL_ERROR "/usr/include is passed to the compiler: ${commands}")
  endif()
endif()
