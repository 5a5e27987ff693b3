# Written by `python tools/completions.py` from the parsers of the programs.

function _shtab_tidegate_governor_scan
  set -g _shtab_tidegate_governor_cmdpath ''
  set -g _shtab_tidegate_governor_npos 0
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
        if contains -- $t $_shtab_tidegate_governor_opts_with_value
          set expect_value 1
        end
        continue
      case '*'
        if test $_shtab_tidegate_governor_npos -eq 0
          set -l candidate $t
          if test -n "$_shtab_tidegate_governor_cmdpath"
            set candidate "$_shtab_tidegate_governor_cmdpath $t"
          end
          if contains -- $candidate $_shtab_tidegate_governor_commands
            set -g _shtab_tidegate_governor_cmdpath $candidate
            continue
          end
        end
        set -g _shtab_tidegate_governor_npos (math $_shtab_tidegate_governor_npos + 1)
    end
  end
end

# Condition helper: true if the current (sub)command path equals the given one.
function _shtab_tidegate_governor_using
  _shtab_tidegate_governor_scan
  test "$_shtab_tidegate_governor_cmdpath" = "$argv"
end

set -g _shtab_tidegate_governor_commands
set -g _shtab_tidegate_governor_opts_with_value --config --driver-dir --runtime-dir --state-dir

complete -c tidegate-governor -e
complete -c tidegate-governor -f

complete -c tidegate-governor -n _shtab_tidegate_governor_using -s h -l help -d 'show this help message and exit'
complete -c tidegate-governor -n _shtab_tidegate_governor_using -l config -xka "(__fish_complete_path (commandline -ct))" -d 'configuration file (/etc/tidegate/config.yaml)'
complete -c tidegate-governor -n _shtab_tidegate_governor_using -l runtime-dir -xka "(__fish_complete_directories)" -d 'use this directory instead of the configured one'
complete -c tidegate-governor -n _shtab_tidegate_governor_using -l state-dir -xka "(__fish_complete_directories)" -d 'use this directory instead of the configured one'
complete -c tidegate-governor -n _shtab_tidegate_governor_using -l driver-dir -xka "(__fish_complete_directories)" -d 'use this directory instead of the configured one'
complete -c tidegate-governor -n _shtab_tidegate_governor_using -l wait -d 'wait for another governor in the same directory to end, and take its place'
