{{/* Where the model comes from, for Pods that mount it. */}}

{{- define "pdserve.modelFlags" -}}
- {{ printf "--model=%s" .Values.model.path | quote }}
{{- with .Values.model.servedName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- end }}

{{- define "pdserve.modelVolumes" -}}
{{- with .Values.model }}
{{- if eq .source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ required "model.pvc.claimName is empty, model.source is pvc" .pvc.claimName | quote }}
    readOnly: true
{{- else if eq .source "image" }}
- name: model
  image:
    reference: {{ required "model.image.reference is empty, model.source is image" .image.reference | quote }}
    pullPolicy: {{ .image.pullPolicy }}
{{- else if eq .source "hub" }}
- name: model
  emptyDir: {sizeLimit: {{ .hub.sizeLimit }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "pdserve.modelMounts" -}}
{{- with .Values.model }}
{{- if ne .source "bundled" }}
- name: model
  mountPath: /models
  readOnly: true
  {{- if and (eq .source "pvc") .pvc.subPath }}
  subPath: {{ .pvc.subPath | quote }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The download from the hub. Takes root and component: routers need the tokenizer, not the weights. */}}
{{- define "pdserve.modelInitContainers" -}}
{{- with .root.Values.model }}
{{- if eq .source "hub" }}
- name: download
  {{- include "pdserve.image" (dict "image" $.root.Values.router.image "tag" $.root.Chart.AppVersion) | nindent 2 }}
  command:
    - hf
    - download
    - {{ required "model.hub.repository is empty, model.source is hub" .hub.repository | quote }}
    - {{ printf "--revision=%s" .hub.revision | quote }}
    - {{ printf "--local-dir=%s" .path | quote }}
    {{- if eq $.component "router" }}
    - --include=*.json
    - --include=*.jinja
    - --include=*.model
    {{- else }}
    - --exclude=*.bin
    - --exclude=*.gguf
    - --exclude=*.pth
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- if .hub.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ .hub.tokenSecret | quote }}, key: {{ .hub.tokenSecretKey | quote }}}
    {{- end }}
  resources:
    {{- toYaml .hub.resources | nindent 4 }}
  securityContext:
    {{- include "pdserve.containerSecurity" $ | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: model, mountPath: /models}
{{- end }}
{{- end }}
{{- end }}
