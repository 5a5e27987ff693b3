# Written by `python tools/completions.py` from the parsers of the programs.

function _shtab_tidegate_scan
  set -g _shtab_tidegate_cmdpath ''
  set -g _shtab_tidegate_npos 0
  set -l tokens (commandline -opc)
  set -e tokens[1]
  set -l expect_value 0
  for t in $tokens
    if test $expect_value -eq 1
      set expect_value 0
      continue
    end
    switch "$t"
      case '--*=*'
        continue
      case '-*'
        if contains -- $t $_shtab_tidegate_opts_with_value
          set expect_value 1
        end
        continue
      case '*'
        if test $_shtab_tidegate_npos -eq 0
          set -l candidate $t
          if test -n "$_shtab_tidegate_cmdpath"
            set candidate "$_shtab_tidegate_cmdpath $t"
          end
          if contains -- $candidate $_shtab_tidegate_commands
            set -g _shtab_tidegate_cmdpath $candidate
            continue
          end
        end
        set -g _shtab_tidegate_npos (math $_shtab_tidegate_npos + 1)
    end
  end
end

# Condition helper: true if the current (sub)command path equals the given one.
function _shtab_tidegate_using
  _shtab_tidegate_scan
  test "$_shtab_tidegate_cmdpath" = "$argv"
end

set -g _shtab_tidegate_commands ps top inspect claims set suspend resume events check reload doctor explain setup cdi 'cdi generate' 'cdi list' convert refresh verify gc install
set -g _shtab_tidegate_opts_with_value --annotation --bin-dir --bundle --class --compute --compute-limit --config --container --containerd-version --control-dir --count --dev-dir --driver-dir --gpu-memory --hook --hook-argument --hooks-dir --interval --library-dir --log --memory --module-version --output --root --rootfs --runtime-dir --since --wait

complete -c tidegate -e
complete -c tidegate -f

complete -c tidegate -n _shtab_tidegate_using -s h -l help -d 'show this help message and exit'
complete -c tidegate -n _shtab_tidegate_using -l version -d 'show program'"'"'s version number and exit'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a ps -d 'List the containers that share this node'"'"'s GPUs.'
complete -c tidegate -n '_shtab_tidegate_using ps' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using ps' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'configuration file (/etc/tidegate/config.yaml)'
complete -c tidegate -n '_shtab_tidegate_using ps' -l runtime-dir -xka "(__fish_complete_directories)" -d 'the governor'"'"'s directory (/run/tidegate)'
complete -c tidegate -n '_shtab_tidegate_using ps' -l json -d 'print everything that the governor reports, as JSON'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a top -d 'Show GPUs and containers live.'
complete -c tidegate -n '_shtab_tidegate_using top' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using top' -l interval -x -d 'interval between updates (default 2)'
complete -c tidegate -n '_shtab_tidegate_using top' -l count -x -d 'number of updates (default: unlimited)'
complete -c tidegate -n '_shtab_tidegate_using top' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'configuration file (/etc/tidegate/config.yaml)'
complete -c tidegate -n '_shtab_tidegate_using top' -l runtime-dir -xka "(__fish_complete_directories)" -d 'the governor'"'"'s directory (/run/tidegate)'
complete -c tidegate -n '_shtab_tidegate_using top' -l json -d 'print one JSON document on one line for each update'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a inspect -d 'Show everything that is known about a container or a claim.'
complete -c tidegate -n '_shtab_tidegate_using inspect' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using inspect' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'configuration file (/etc/tidegate/config.yaml)'
complete -c tidegate -n '_shtab_tidegate_using inspect' -l runtime-dir -xka "(__fish_complete_directories)" -d 'the governor'"'"'s directory (/run/tidegate)'
complete -c tidegate -n '_shtab_tidegate_using inspect' -l json -d 'print one JSON document'
complete -c tidegate -n '_shtab_tidegate_using inspect; and test $_shtab_tidegate_npos -eq 0' -ka "(tidegate ps 2>/dev/null | awk '/^not its own|^unknown functions/ {exit} NR > 1 && \$1 ~ /^[A-Za-z0-9][A-Za-z0-9_.+-]*\$/ {print \$1}')" -d 'a container, by its id, a unique prefix of its id, its name or its pod; or a claim, by its uid, NAMESPACE/NAME or name (claim/NAME if a pod has the same name)'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a claims -d 'List the claims that are booked on this node'"'"'s GPUs.'
complete -c tidegate -n '_shtab_tidegate_using claims' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using claims' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'configuration file (/etc/tidegate/config.yaml)'
complete -c tidegate -n '_shtab_tidegate_using claims' -l runtime-dir -xka "(__fish_complete_directories)" -d 'the governor'"'"'s directory (/run/tidegate)'
complete -c tidegate -n '_shtab_tidegate_using claims' -l json -d 'print everything that the governor reports, as JSON'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a set -d 'Change the quota of a container while it runs.'
complete -c tidegate -n '_shtab_tidegate_using set' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using set' -l memory -x -d 'device memory on each of its GPUs, like 12Gi'
complete -c tidegate -n '_shtab_tidegate_using set' -l compute -x -d 'guaranteed share of each GPU, in percent'
complete -c tidegate -n '_shtab_tidegate_using set' -l compute-limit -x -d 'maximum share that it may use while others leave time idle'
complete -c tidegate -n '_shtab_tidegate_using set' -l class -xka "throughput latency" -d 'class of its work, like the annotation tidegate.gpu/class'
complete -c tidegate -n '_shtab_tidegate_using set' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'configuration file (/etc/tidegate/config.yaml)'
complete -c tidegate -n '_shtab_tidegate_using set' -l runtime-dir -xka "(__fish_complete_directories)" -d 'the governor'"'"'s directory (/run/tidegate)'
complete -c tidegate -n '_shtab_tidegate_using set; and test $_shtab_tidegate_npos -eq 0' -ka "(tidegate ps 2>/dev/null | awk '/^not its own|^unknown functions/ {exit} NR > 1 && \$1 ~ /^[A-Za-z0-9][A-Za-z0-9_.+-]*\$/ {print \$1}')" -d 'the container'"'"'s id, a unique prefix of its id, its name, or its pod'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a suspend -d 'Move a container'"'"'s GPU memory to host memory, and make the container wait.'
complete -c tidegate -n '_shtab_tidegate_using suspend' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using suspend' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'configuration file (/etc/tidegate/config.yaml)'
complete -c tidegate -n '_shtab_tidegate_using suspend' -l runtime-dir -xka "(__fish_complete_directories)" -d 'the governor'"'"'s directory (/run/tidegate)'
complete -c tidegate -n '_shtab_tidegate_using suspend' -l wait -x -d 'time within which its submitted work has to end (30)'
complete -c tidegate -n '_shtab_tidegate_using suspend; and test $_shtab_tidegate_npos -eq 0' -ka "(tidegate ps 2>/dev/null | awk '/^not its own|^unknown functions/ {exit} NR > 1 && \$1 ~ /^[A-Za-z0-9][A-Za-z0-9_.+-]*\$/ {print \$1}')" -d 'the container'"'"'s id, a unique prefix of its id, its name, or its pod'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a resume -d 'Bring back the GPU memory of a suspended container, and let it run.'
complete -c tidegate -n '_shtab_tidegate_using resume' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using resume' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'configuration file (/etc/tidegate/config.yaml)'
complete -c tidegate -n '_shtab_tidegate_using resume' -l runtime-dir -xka "(__fish_complete_directories)" -d 'the governor'"'"'s directory (/run/tidegate)'
complete -c tidegate -n '_shtab_tidegate_using resume; and test $_shtab_tidegate_npos -eq 0' -ka "(tidegate ps 2>/dev/null | awk '/^not its own|^unknown functions/ {exit} NR > 1 && \$1 ~ /^[A-Za-z0-9][A-Za-z0-9_.+-]*\$/ {print \$1}')" -d 'the container'"'"'s id, a unique prefix of its id, its name, or its pod'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a events -d 'Show why containers did not start, from the node'"'"'s log.'
complete -c tidegate -n '_shtab_tidegate_using events' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using events' -l container -xka "(tidegate ps 2>/dev/null | awk '/^not its own|^unknown functions/ {exit} NR > 1 && \$1 ~ /^[A-Za-z0-9][A-Za-z0-9_.+-]*\$/ {print \$1}')" -d 'show the events of this container only: its id or a prefix of its id; for a pod or claim, NAMESPACE/NAME'
complete -c tidegate -n '_shtab_tidegate_using events' -l all -d 'also show what succeeded'
complete -c tidegate -n '_shtab_tidegate_using events' -l since -x -d 'show events since this time, in journalctl'"'"'s format: --since=today, --since=-1h'
complete -c tidegate -n '_shtab_tidegate_using events' -l follow -d 'wait for further events'
complete -c tidegate -n '_shtab_tidegate_using events' -l log -xka "(__fish_complete_path (commandline -ct))" -d 'read this file: the hook'"'"'s log (its --log), the governor'"'"'s output, or a syslog; may be repeated (default: the journal, or else /var/log/syslog or messages)'
complete -c tidegate -n '_shtab_tidegate_using events' -l json -d 'print each event as it was written'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a check -d 'Check a configuration file, or this node.'
complete -c tidegate -n '_shtab_tidegate_using check' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using check' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'the node'"'"'s configuration (/etc/tidegate/config.yaml)'
complete -c tidegate -n '_shtab_tidegate_using check' -l runtime-dir -xka "(__fish_complete_directories)" -d 'the governor'"'"'s directory (/run/tidegate)'
complete -c tidegate -n '_shtab_tidegate_using check' -l driver-dir -xka "(__fish_complete_directories)" -d 'the mirror'"'"'s directory (/var/lib/tidegate/driver)'
complete -c tidegate -n '_shtab_tidegate_using check' -l json -d 'print the findings as JSON'
complete -c tidegate -n '_shtab_tidegate_using check; and test $_shtab_tidegate_npos -eq 0' -ka "(__fish_complete_path (commandline -ct))" -d 'check this configuration file only'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a reload -d 'Make the governor read its configuration again.'
complete -c tidegate -n '_shtab_tidegate_using reload' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using reload' -l dry-run -d 'only report what would change'
complete -c tidegate -n '_shtab_tidegate_using reload' -l runtime-dir -xka "(__fish_complete_directories)" -d 'the governor'"'"'s directory (/run/tidegate)'
complete -c tidegate -n '_shtab_tidegate_using reload' -l json -d 'print one JSON document'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a doctor -d 'Examine this node: driver, mirror, governor, engines, and anything else that could be wrong.'
complete -c tidegate -n '_shtab_tidegate_using doctor' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using doctor' -l root -xka "(__fish_complete_directories)" -d 'directory that is the node'"'"'s root; if it is not /, no command is run (default /)'
complete -c tidegate -n '_shtab_tidegate_using doctor' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'the node'"'"'s configuration (/etc/tidegate/config.yaml)'
complete -c tidegate -n '_shtab_tidegate_using doctor' -l runtime-dir -xka "(__fish_complete_directories)" -d 'the governor'"'"'s directory (/run/tidegate)'
complete -c tidegate -n '_shtab_tidegate_using doctor' -l driver-dir -xka "(__fish_complete_directories)" -d 'the mirror'"'"'s directory (/var/lib/tidegate/driver)'
complete -c tidegate -n '_shtab_tidegate_using doctor' -l problems -d 'omit notes, and findings that are ok'
complete -c tidegate -n '_shtab_tidegate_using doctor' -l strict -d 'also exit with status 1 for warnings and for things that could not be examined'
complete -c tidegate -n '_shtab_tidegate_using doctor' -l json -d 'print one JSON document'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a explain -d 'Show what a container would get, and why.'
complete -c tidegate -n '_shtab_tidegate_using explain' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using explain' -l bundle -xka "(__fish_complete_directories)" -d 'read annotations and root from its config.json'
complete -c tidegate -n '_shtab_tidegate_using explain' -l annotation -x -d 'an annotation, which replaces the bundle'"'"'s; may be repeated'
complete -c tidegate -n '_shtab_tidegate_using explain' -l rootfs -xka "(__fish_complete_directories)" -d 'the container'"'"'s root file system'
complete -c tidegate -n '_shtab_tidegate_using explain' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'the node'"'"'s configuration (/etc/tidegate/config.yaml)'
complete -c tidegate -n '_shtab_tidegate_using explain' -l driver-dir -xka "(__fish_complete_directories)" -d 'where generations of the driver'"'"'s mirror are (default /var/lib/tidegate/driver)'
complete -c tidegate -n '_shtab_tidegate_using explain' -l hook -xka "(__fish_complete_path (commandline -ct))" -d 'the path under which a claim adds the hook to config.json (default /usr/bin/tidegate-hook)'
complete -c tidegate -n '_shtab_tidegate_using explain' -l module-version -xka "(__fish_complete_path (commandline -ct))" -d 'file with the kernel module'"'"'s version (default /proc/driver/nvidia/version)'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a setup -d 'Make a container engine use Tidegate.'
complete -c tidegate -n '_shtab_tidegate_using setup' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using setup' -l dry-run -d 'write nothing; show the difference'
complete -c tidegate -n '_shtab_tidegate_using setup' -l undo -d 'restore the previous configuration'
complete -c tidegate -n '_shtab_tidegate_using setup' -l root -xka "(__fish_complete_directories)" -d 'the node'"'"'s root (default /)'
complete -c tidegate -n '_shtab_tidegate_using setup' -l bin-dir -xka "(__fish_complete_directories)" -d 'where tidegate-hook and tidegate-runtime are on the node (default /usr/bin)'
complete -c tidegate -n '_shtab_tidegate_using setup' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'the engine'"'"'s configuration file, if it is not the default'
complete -c tidegate -n '_shtab_tidegate_using setup' -l default -d 'docker: also make tidegate-runtime the default runtime'
complete -c tidegate -n '_shtab_tidegate_using setup' -l hooks-dir -xka "(__fish_complete_directories)" -d 'podman: directory from which it reads hooks'
complete -c tidegate -n '_shtab_tidegate_using setup' -l containerd-version -x -d 'containerd: the version to assume if containerd cannot be run'
complete -c tidegate -n '_shtab_tidegate_using setup' -l base-spec -d 'containerd: add the hook through a base_runtime_spec, without the wrapper runtime'
complete -c tidegate -n '_shtab_tidegate_using setup' -l runtime-class -d 'containerd, crio: only print the RuntimeClass for Kubernetes'
complete -c tidegate -n '_shtab_tidegate_using setup; and test $_shtab_tidegate_npos -eq 0' -ka "docker podman containerd crio" -d 'the engine to configure'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a cdi -d 'Describe the node'"'"'s GPUs to engines that support CDI.'
complete -c tidegate -n '_shtab_tidegate_using cdi' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using cdi; and test $_shtab_tidegate_npos -eq 0' -a generate -d 'Write the specification of the GPUs that the driver reports.'
complete -c tidegate -n '_shtab_tidegate_using cdi generate' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using cdi generate' -l output -xka "(__fish_complete_path (commandline -ct))" -d 'write it to this file; engines read /var/run/cdi and /etc/cdi (default: print it)'
complete -c tidegate -n '_shtab_tidegate_using cdi generate' -l hook -xka "(__fish_complete_path (commandline -ct))" -d 'the hook (/usr/bin/tidegate-hook)'
complete -c tidegate -n '_shtab_tidegate_using cdi generate' -l hook-argument -x -d 'an argument for the hook; may be repeated'
complete -c tidegate -n '_shtab_tidegate_using cdi generate' -l dev-dir -xka "(__fish_complete_directories)" -d 'the host'"'"'s device nodes (/dev)'
complete -c tidegate -n '_shtab_tidegate_using cdi generate' -l driver-dir -xka "(__fish_complete_directories)" -d 'the driver'"'"'s mirror (/var/lib/tidegate/driver)'
complete -c tidegate -n '_shtab_tidegate_using cdi; and test $_shtab_tidegate_npos -eq 0' -a list -d 'List the names by which the devices are requested from engines.'
complete -c tidegate -n '_shtab_tidegate_using cdi list' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using cdi list' -l driver-dir -xka "(__fish_complete_directories)" -d 'the driver'"'"'s mirror (/var/lib/tidegate/driver)'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a convert -d 'Turn pods that ask HAMi, gpu-manager or NVIDIA'"'"'s plugin for a GPU into pods with claims.'
complete -c tidegate -n '_shtab_tidegate_using convert' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using convert' -l gpu-memory -x -d 'memory of one GPU, for example 80Gi; gpumem-percentage is a percentage of it'
complete -c tidegate -n '_shtab_tidegate_using convert' -l compute -x -d 'percent guaranteed to pods that ask HAMi for memory only (10)'
complete -c tidegate -n '_shtab_tidegate_using convert' -l json -d 'print one JSON document: the manifests as a List, and the notes'
complete -c tidegate -n '_shtab_tidegate_using convert; and test $_shtab_tidegate_npos -eq 0' -ka "(__fish_complete_path (commandline -ct))" -d 'manifests as YAML or JSON; - is standard input'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a refresh -d 'Mirror the host'"'"'s driver, with the control library interposed.'
complete -c tidegate -n '_shtab_tidegate_using refresh' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l root -xka "(__fish_complete_directories)" -d 'the tree to search (default /)'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l output -xka "(__fish_complete_directories)" -d 'where generations are kept (default /var/lib/tidegate/driver)'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l control-dir -xka "(__fish_complete_directories)" -d 'directory of the control libraries libcuda.so.1 and libnvidia-ml.so.1 (default /usr/lib/tidegate/MACHINE-linux-gnu)'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l library-dir -xka "(__fish_complete_directories)" -d 'search only this directory below the root; may be repeated'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l sockets -d 'give containers the sockets of nvidia-persistenced and nv-fabricmanager, which treat a container'"'"'s root as the host'"'"'s'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l repair -d 'also read the generation in force, and replace it if its content is damaged'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l accept-loss -d 'mirror the driver even if it lacks libraries that the mirror in force has'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l no-hard-links -d 'copy files if the file system has no reflinks, instead of sharing them with the host'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l dry-run -d 'write nothing; list what would be made'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l verbose -d 'list every name that changed'
complete -c tidegate -n '_shtab_tidegate_using refresh' -l json -d 'print one JSON document'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a verify -d 'Check the content of a generation of the mirror, and whether its libraries load.'
complete -c tidegate -n '_shtab_tidegate_using verify' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using verify' -l driver-dir -xka "(__fish_complete_directories)" -d 'where generations are (default /var/lib/tidegate/driver)'
complete -c tidegate -n '_shtab_tidegate_using verify' -l no-load -d 'check files only; load no library'
complete -c tidegate -n '_shtab_tidegate_using verify' -l json -d 'print one JSON document'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a gc -d 'Remove generations of the mirror that no container uses.'
complete -c tidegate -n '_shtab_tidegate_using gc' -s h -l help -d 'show this help message and exit'
complete -c tidegate -n '_shtab_tidegate_using gc' -l driver-dir -xka "(__fish_complete_directories)" -d 'where generations are (default /var/lib/tidegate/driver)'
complete -c tidegate -n '_shtab_tidegate_using gc' -l dry-run -d 'remove nothing; list what would be removed'
complete -c tidegate -n '_shtab_tidegate_using gc' -l nested -d 'assume that all containers of the node are in this PID namespace, although it is not the host'"'"'s'
complete -c tidegate -n '_shtab_tidegate_using gc' -l json -d 'print one JSON document'
complete -c tidegate -n '_shtab_tidegate_using; and test $_shtab_tidegate_npos -eq 0' -a install -d 'Print a shell script that installs the configuration, the units and, where engines look for them, the programs. A package does all of this.'
complete -c tidegate -n '_shtab_tidegate_using install' -s h -l help -d 'show this help message and exit'
