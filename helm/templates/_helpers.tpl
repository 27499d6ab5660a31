{{- define "pdserve.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Names of what is made begin with it; 40 characters leave room for "-prefill-" and a revision. */}}
{{- define "pdserve.fullname" -}}
{{- $name := include "pdserve.name" . -}}
{{- $unique := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{ default $unique .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "pdserve.serviceAccountName" -}}
{{- $name := .Values.serviceAccount.create | ternary (include "pdserve.fullname" .) "default" -}}
{{ default $name .Values.serviceAccount.name }}
{{- end }}

{{/* Labels that never change: those of selectors. */}}
{{- define "pdserve.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pdserve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "pdserve.labels" -}}
{{ include "pdserve.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: pdserve
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/*
The values of one pool, as YAML: its own over those of both. Takes root and role. Who asks for an RDMA device means to
use it: without require_transport a device that is lost would become slow TCP, and nothing would say so.
*/}}
{{- define "pdserve.pool" -}}
{{- $own := get .root.Values .role -}}
{{- $pool := mustMergeOverwrite (deepCopy .root.Values.worker) (deepCopy $own) -}}
{{- if and (hasKey $own "runAsUser") (kindIs "invalid" $own.runAsUser) -}}
{{- $_ := unset $pool "runAsUser" -}}
{{- end -}}
{{- if $pool.rdma.resource -}}
{{- $_ := mustMerge $pool (dict "config" (dict "require_transport" "rdma")) -}}
{{- end -}}
{{ toYaml $pool }}
{{- end }}

{{/* What routers and workers must agree on. Workers that differ in it are other workers. */}}
{{- define "pdserve.revision" -}}
{{- $model := .Values.model -}}
{{- $parts := list (pick $model "source" "path" "servedName" "pvc") $model.image.reference .Values.revision -}}
{{- $parts = append $parts (pick $model.hub "repository" "revision") -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := include "pdserve.pool" (dict "root" $ "role" $role) | fromYaml -}}
{{- $parts = append $parts (pick $pool.config "dtype" "kv_cache_dtype" "quantization" "block_size") -}}
{{- end -}}
{{- if include "pdserve.hasTls" . -}}
{{- $parts = append $parts "tls" -}}
{{- end -}}
{{ toJson $parts | sha256sum | trunc 8 }}
{{- end }}

{{/* Name of the headless Service with a pool's workers of this revision. Takes root and role. */}}
{{- define "pdserve.poolService" -}}
{{ include "pdserve.fullname" .root }}-{{ .role }}-{{ include "pdserve.revision" .root }}
{{- end }}

{{/* A config map as flags. Numbers through JSON: Go would write 8388608 as 8.388608e+06. */}}
{{- define "pdserve.flags" -}}
{{- range $field, $value := . }}
{{- $flag := replace "_" "-" $field }}
{{- if kindIs "bool" $value }}
- --{{ $value | ternary "" "no-" }}{{ $flag }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $flag (join "," $value) | quote }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $flag $value | quote }}
{{- else }}
- --{{ $flag }}={{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* Takes root, image and the tag to use if the image names none. */}}
{{- define "pdserve.image" -}}
image: {{ printf "%s:%s" .image.repository (default .tag .image.tag) | quote }}
imagePullPolicy: {{ .image.pullPolicy }}
{{- end }}

{{- define "pdserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Takes the user, nothing for one that the platform chooses. */}}
{{- define "pdserve.podSecurity" -}}
{{- if kindIs "invalid" . }}
runAsNonRoot: true
{{- else }}
runAsNonRoot: {{ ne (int .) 0 }}
runAsUser: {{ int . }}
runAsGroup: {{ int . }}
fsGroup: {{ int . }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}
